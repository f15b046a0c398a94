"""Compare the radial budget and the statistics by parameter of real training runs with a written-out loop."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace

import lightning as L
import pytest
import torch
from torch.nn import functional as F

from mmqk.config import LossConfig, MonitorConfig
from mmqk.model import PerModalityConfig, QKNormConfig
from mmqk.monitors import NormMonitor
from mmqk.monitors.own.callback import RunMonitor
from mmqk.store import AlarmRules
from tests.training.toy import MODEL, apart, cut, fit, module_of, toy_batch, weights

EVERYTHING = MonitorConfig(
    every_n_steps=2, probe_sequences=2, heads=True, parameters=True, precision=True, gradient_agreement=True,
    budget_every_n_steps=4, budget_steps=3,
)  # fmt: skip
PARTS = ("decay", "step", "unattributed", "rest")


class Weights(L.Callback):
    """Record the weights before the first step and after each step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_train_start(self, trainer, pl_module) -> None:
        self.seen.append(weights(pl_module))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.seen.append(weights(pl_module))


def squares_of(weights: dict[str, torch.Tensor]) -> Counter[str]:
    """Return |W|^2 of every W_q and W_k, summed over the copies of a matrix."""
    squares: Counter[str] = Counter()
    for name, w in weights.items():
        if match := re.match(r"blocks\.(\d+)\.attention\.(w_[qk])\..*weight", name):
            squares[f"{match[2]}/layer{int(match[1]):02d}"] += float(w.square().sum())
    return squares


@pytest.fixture
def logged(monkeypatch) -> dict[int, dict[str, float]]:
    """Return a dictionary of the values that RunMonitor logs, by step."""
    lines: dict[int, dict[str, float]] = {}

    def keep(trainer, values) -> None:
        if values:
            lines.setdefault(trainer.global_step, {}).update(values)

    monkeypatch.setattr("mmqk.monitors.own.callback._log", keep)
    return lines


def batches_of(steps: int, accumulate: int = 1):
    return [micro for step in range(steps) for micro in cut(toy_batch(step), accumulate)]


CASES = {
    "micro-batches and clipping": ({}, {"weight_decay": 0.0}, {"accumulate": 2, "clip": 0.05}, {}),
    "z-loss and weights": ({}, {}, {"clip": 0.5}, {"z_loss": 1e-2, "weights": {"image": 0.5}}),
    "untied": ({"per_modality": PerModalityConfig(qk=True), "residual_dropout": 0.2}, {}, {"clip": 0.05}, {}),
    "clipped logits": ({}, {"qk_clip": 1e-3}, {"accumulate": 2}, {}),
    "split, one off": ({}, {"split_second_moment": True}, {"accumulate": 2}, {"weights": {"text": 0.0}}),
    "update clipping": ({}, {"update_clip": True, "weight_decay": 0.5}, {"accumulate": 2, "clip": 0.05}, {}),
    "fixed norm": ({}, {"matrices": "adamh"}, {"accumulate": 2, "clip": 0.05}, {}),
    "MuonClip": ({}, {"matrices": "muon", "weight_decay": 0.5, "qk_clip": 1e-3}, {"accumulate": 2, "clip": 0.05}, {}),
}


@pytest.mark.parametrize(("model", "optim", "run", "loss"), CASES.values(), ids=CASES)
def test_the_parts_of_a_run_sum_to_the_measured_change(logged, model, optim, run, loss):
    module = module_of(replace(MODEL, **model), LossConfig(**loss), **optim)
    record = Weights()
    batches = batches_of(9, run.get("accumulate", 1))
    config = replace(EVERYTHING, parameters=optim.get("matrices") != "muon")
    fit(module, batches, **run, callbacks=[RunMonitor(config), record])
    ends = {3: 0, 7: 4, 9: 8}  # the last window is cut short by the end of the run
    assert [s for s, line in logged.items() if "budget_window" in line] == list(ends)
    for end, start in ends.items():
        line = logged[end]
        assert line["budget_window"] == end - start
        assert (line["budget_clip_factor"] < 1) == ("clip" in run)
        before, after = squares_of(record.seen[start]), squares_of(record.seen[end])
        for where, square in after.items():
            name, layer = where.split("/")
            change = square - before[where]
            parts = {part: line[f"{name}_growth_{part}/{layer}"] for part in PARTS}
            off = [m for m, weight in loss.get("weights", {}).items() if not weight]
            matrices = optim.get("matrices")
            off = ["text", "image"] if matrices == "muon" else off
            parts |= {m: line[f"{name}_growth/{m}/{layer}"] for m in ("text", "image") if m not in off}
            assert line[f"{name}_sq/{layer}"] == pytest.approx(square)
            size = sum(abs(v) for v in parts.values())
            rounding = {"abs": 1e-12 * square} if matrices == "adamh" else {}
            assert line[f"{name}_growth_total/{layer}"] == pytest.approx(change, **rounding)
            assert sum(parts.values()) == pytest.approx(change, **rounding)
            if matrices == "adamh":  # AdamH keeps the norm: the change is 0, but its parts are not
                assert abs(change) < 1e-12 * square
                assert min(abs(parts[p]) for p in ("text", "image", "decay", "step")) > 1e-7 * square
            if "qk_clip" in optim:
                assert parts["rest"] < -0.1 * square  # only the rest contains the effect of QK-Clip
            else:
                assert abs(parts["rest"]) < 1e-9 * size
            moments = start > 0 and "split_second_moment" not in optim
            assert (parts["unattributed"] != 0) == (moments or matrices == "muon")
            assert parts.get("image") != 0 and not any(f"{name}_growth/{m}/{layer}" in line for m in off)


def test_the_parts_are_those_of_a_loop_written_out(logged, clip=0.05):
    """The loop computes losses, clipping and first moments itself and updates the weights with torch's AdamW. The run
    has two micro-batches per step, the loop has one batch."""
    module = module_of(weight_decay=0.1)
    fit(module, batches_of(3, 2), accumulate=2, clip=clip, callbacks=[RunMonitor(EVERYTHING)])

    model = module_of(weight_decay=0.1).model
    groups = [{"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    target = {f"w_{s}/layer{i:02d}": getattr(b.attention, f"w_{s}").weight
              for i, b in enumerate(model.blocks) for s in "qk"}  # fmt: skip
    moments = {(name, m): torch.zeros_like(w) for name, w in target.items() for m in range(2)}
    sums = dict.fromkeys(moments, 0.0)
    for step in range(1, 4):
        batch = toy_batch(step - 1)
        own = {}
        for m in range(2):
            optimizer.zero_grad()
            ce_BT = F.cross_entropy(model(batch.ids_BT).transpose(1, 2), batch.ids_BT.roll(-1, 1), reduction="none")
            of_m = batch.target_mask_BT & ((batch.ids_BT.roll(-1, 1) >= 9) == m)
            (ce_BT[of_m].sum() / batch.target_mask_BT.sum()).backward()
            own[m] = {p: p.grad.clone() for p in model.parameters() if p.grad is not None}
        for p in model.parameters():
            p.grad = sum(own[m][p] for m in range(2) if p in own[m])
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        factor = min(1.0, clip / (float(norm) + 1e-6))
        for p in model.parameters():
            p.grad *= factor
        before = {name: w.detach().clone() for name, w in target.items()}
        optimizer.step()
        for (name, m), moment in moments.items():
            w = target[name]
            moment.mul_(0.9).add_(0.1 * factor * own[m][w])
            v_hat = optimizer.state[w]["exp_avg_sq"] / (1 - 0.95**step)
            update = -0.01 * moment / (1 - 0.9**step) / (v_hat.sqrt() + 1e-8)
            sums[name, m] += 2 * float((before[name] * update).sum())
    for (name, m), expected in sums.items():
        matrix, layer = name.split("/")
        modality = ("text", "image")[m]
        assert logged[3][f"{matrix}_growth/{modality}/{layer}"] == pytest.approx(expected, rel=1e-8)
    # The control: the modalities differ, so the test detects exchanged modalities.
    assert sums["w_q/layer00", 0] != pytest.approx(sums["w_q/layer00", 1], rel=1e-2)


def test_sizes_by_parameter(logged):
    """The values belong to the step before the probe.

    They are the size of the update relative to the learning rate and to the parameter, the gradient norm, and the
    share of elements below Adam's eps.
    """
    module = module_of(weight_decay=0.1, eps=1e-4)
    batches = batches_of(4)
    record = Weights()
    lines = fit(module, batches, clip=0.05, callbacks=[RunMonitor(EVERYTHING), record])
    for step in (2, 4):
        norms = []
        for name, _ in module.model.named_parameters():
            before = record.seen[step - 1][name]
            change = record.seen[step][name] - before
            rms = float(change.square().mean().sqrt())
            assert logged[step][f"update_rms/{name}"] == pytest.approx(rms / 0.01, rel=1e-4)
            ratio = rms / float(before.square().mean().sqrt())
            assert logged[step][f"update_ratio/{name}"] == pytest.approx(ratio, rel=1e-4)
            assert 0 <= logged[step][f"adam_below_eps/{name}"] <= 1
            norms.append(logged[step][f"grad_norm/{name}"])
        assert sum(n * n for n in norms) ** 0.5 == pytest.approx(lines[step - 1]["grad_norm"], rel=1e-6)
        floors = [v for tag, v in logged[step].items() if tag.startswith("adam_below_eps")]
        assert max(floors) > min(floors)  # some elements are below eps and some above
    assert not any(tag.startswith("update_rms") for tag in logged.get(3, {}))


def test_a_parameter_of_zeros_has_no_ratio_and_rings_no_alarm(logged):
    """Zero-centered gains are 0 before the first step."""
    module = module_of(replace(MODEL, qk_norm=QKNormConfig("rms", gain="zero_centered")))
    batches = batches_of(2)
    fit(module, batches, callbacks=[RunMonitor(replace(EVERYTHING, every_n_steps=1))])
    gains = [name for name, _ in module.model.named_parameters() if "attention.q_norm" in name]
    ratios = [[f"update_ratio/{name}" in logged[step] for name in gains] for step in (1, 2)]
    assert len(gains) == 2 and not any(ratios[0]) and all(ratios[1])
    assert all(math.isfinite(logged[step][f"update_rms/{name}"]) for step in (1, 2) for name in gains)
    for step in (1, 2):
        assert not AlarmRules().update(step, logged[step])
        assert "update_ratio/blocks.0.attention.w_q.weight" in logged[step]
    # The control: a NaN in an update raises an alarm.
    assert AlarmRules().update(3, {**logged[2], "update_rms/embed.weight": math.nan})


@pytest.mark.parametrize("extra", [{"qk_clip": 1e-3}, {"split_second_moment": True}], ids=str)
def test_a_watched_run_has_the_weights_of_one_that_nobody_watches(logged, extra):
    """QK-Clip reads the attention logits of every forward pass in training, but not those of a probe."""
    model, accumulate = replace(MODEL, residual_dropout=0.2, attn_dropout=0.1), 2
    modules = [module_of(model, **extra) for _ in range(3)]
    batches = batches_of(6, accumulate)
    foreign = NormMonitor("model", {"image": range(9, 16)}, every_n_steps=1, sequences=2)
    records = [
        fit(module, batches, accumulate, clip=0.5, callbacks=callbacks)
        for module, callbacks in zip(modules, ([], [RunMonitor(EVERYTHING)], [foreign]), strict=True)
    ]
    assert records[0] == records[1] == records[2] and len(logged[6]) > 100
    assert all(apart(weights(module), weights(modules[0])) == 0 for module in modules[1:])
    # The control: a run with different weights is detected.
    other = module_of(model, **extra, eps=1e-7)
    fit(other, batches, accumulate, clip=0.5)
    assert apart(weights(other), weights(modules[0])) > 0
