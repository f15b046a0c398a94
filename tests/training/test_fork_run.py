"""Train forks from the command line: unchanged, changed, interrupted, and forks of forks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmqk.checkpoint import save_checkpoint
from mmqk.config import resolve
from mmqk.model import EarlyFusionTransformer
from mmqk.store import UserError
from mmqk.train import main
from tests.tiny import data_of
from tests.training.runs import LAST, checkpoint, command, same, saved, series, state

STEP = 8  # of most forks


@pytest.fixture(scope="module")
def parent(whole) -> Path:
    return whole


def fork(parent: Path, out: Path, *fields: str, step: int = STEP) -> dict:
    assert main([f"--fork={checkpoint(parent, step)}", *fields, "--quiet", f"--out={out}"]) == 0
    return json.loads((out / "fork.json").read_text())


def test_fork_that_changes_nothing_is_the_parent(parent, tmp_path, capsys):
    record = fork(parent, tmp_path / "fork")
    assert same(state(tmp_path / "fork"), state(parent))
    assert series(tmp_path / "fork", STEP) == series(parent, STEP)
    assert record["changed"] == [] and record["function"]["logits_rms_relative"] == 0
    assert record["optimizer"] == "carried over" and record["added"] == record["dropped"] == []
    assert "with nothing changed: the function equals the parent's bit for bit" in capsys.readouterr().err
    ours, theirs = (json.loads((f / "run.json").read_text()) for f in (tmp_path / "fork", parent))
    assert ours["identity"].pop("fork") == {
        "parent": theirs["id"], "step": STEP, "skip_batches": 0, "noise": 0.0, "seed": 0,
    }  # fmt: skip
    assert ours["identity"] == theirs["identity"] and ours["id"] != theirs["id"]
    with pytest.raises(UserError, match=r"fork\.skip_batches \(0 in the folder, 1 now\)"):
        fork(parent, tmp_path / "fork", "--fork_skip_batches=1")
    with pytest.raises(UserError, match=r"fork\.parent"):  # the folder of the parent
        fork(parent, parent)
    # The control: the comparison detects a different data order.
    fork(parent, tmp_path / "skipped", "--fork_skip_batches=1")
    assert not same(state(tmp_path / "skipped"), state(parent))


def test_everything_that_has_a_state_goes_on(tiny_args, tmp_path):
    """A fork that changes nothing continues every state of its parent: copies by modality, moments by modality,
    singular vectors, learning rates by width, and a window of the radial budget that is open at the fork."""
    fields = ["--model.weight_reparam=sigma", "--model.qk_norm.kind=l2", "--model.qk_norm.gain=per_head",
              "--model.qk_norm.scale_max=100", "--model.qk_norm.normalize_v=true", "--model.per_modality.qk=true",
              "--model.per_modality.norms=true", "--model.post_norm=true", "--model.layer_scale=0.5",
              "--data.workers=1", "--optim.width_scaling=mup", "--optim.base_width=4", "--monitor.at=[1,3]",
              "--optim.split_second_moment=true", "--optim.decay_gains=true", "--trainer.accumulate_grad_batches=2",
              "--monitor.budget_every_n_steps=6", "--monitor.budget_steps=5", "--data.pack=documents"]  # fmt: skip
    args = [*tiny_args, *fields, "--data.seq_len=256", "--monitor.probe_sequences=1", "--checkpoint.keep=9"]
    assert main([*args, f"--out={tmp_path / 'parent'}"]) == 0
    fork(tmp_path / "parent", tmp_path / "fork")
    assert same(state(tmp_path / "fork"), state(tmp_path / "parent"))
    assert series(tmp_path / "fork", STEP) == series(tmp_path / "parent", STEP)
    assert any("w_q_growth/text/layer00" in line for line in series(tmp_path / "fork", STEP))


def test_the_states_of_muon_and_adagc_go_on_and_new_parameters_have_none(tiny_args, tmp_path):
    """Each parameter keeps its momentum and its AdaGC gamma; new parameters start without a gamma."""
    out = tmp_path / "parent"
    fields = ["--optim.matrices=muon", "--optim.skip_step=6", "--optim.adagc=1.05", "--model.deep_norm=true",
              "--model.pre_norm=false", "--monitor.every_n_steps=0", "--checkpoint.keep=9"]  # fmt: skip
    assert main([*tiny_args, *fields, f"--out={out}"]) == 0
    fork(out, tmp_path / "same")
    assert same(state(tmp_path / "same"), state(out)) and series(tmp_path / "same", STEP) == series(out, STEP)
    record = fork(out, tmp_path / "fork", "--model.qk_norm.kind=rms", "--trainer.max_steps=9")
    gamma, new = (
        dict(zip(content["state_dict"], content["mmqk_guards"]["adagc"]["gamma_P"].tolist(), strict=True))
        for content in (saved(folder, STEP) for folder in (out, tmp_path / "fork"))
    )
    added = {f"model.{entry['name']}" for entry in record["added"]}
    assert added and new.keys() == gamma.keys() | added
    assert new == gamma | dict.fromkeys(added, float("inf"))
    # The control: without the momentum of one matrix, the fork differs from its parent.
    content = saved(out, STEP)
    buffer = next(own for own in content["optimizer_states"][0]["state"].values() if "momentum_buffer" in own)
    buffer["momentum_buffer"].zero_()
    save_checkpoint(content, checkpoint(out, STEP))
    fork(out, tmp_path / "other")
    assert not same(state(tmp_path / "other"), state(out))
    with pytest.raises(UserError, match=r"optim\.matrices is muon in the parent and adamw here"):
        resolve([f"--fork={out}", "--optim.matrices=adamw", "--trainer.max_steps=14"])


def test_the_newest_checkpoint_of_a_run_folder(parent, tmp_path):
    longer = ["--trainer.max_steps=14", "--optim.schedule_steps=12"]
    assert main([f"--fork={parent}", *longer, "--quiet", f"--out={tmp_path / 'fork'}"]) == 0
    record = json.loads((tmp_path / "fork/fork.json").read_text())
    assert record["parent"]["step"] == LAST and record["parent"]["folder"] == str(parent)
    assert [line["step"] for line in series(tmp_path / "fork", LAST)] == [13, 14]
    # After the end of the parent's schedule the learning rate stays at its last value.
    assert [line["lr"] for line in series(tmp_path / "fork", LAST)] == pytest.approx([0.001, 0.001])


# Against plain torch -----------------------------------------------------------------------------------


def by_hand(parent: Path, lr: float, carry: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Continue from the parent's weights, and its moments if ``carry``, with torch's AdamW, without dropout; return
    losses and weights."""
    content, data = saved(parent, STEP), data_of(command(parent))
    model = EarlyFusionTransformer(resolve(command(parent)).model, "math").eval()
    model.load_state_dict({k.removeprefix("model."): v for k, v in content["state_dict"].items()})
    # The order of the optimizer: first matrices and embeddings, which decay, then gains, which do not.
    groups = [{"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
    if carry:
        moments = content["optimizer_states"][0]["state"]
        optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    losses = []
    for step in range(STEP, LAST):
        batch = data.order.builder.batch([data.order.row(n) for n in range(4 * step, 4 * step + 4)])
        at = batch.target_mask_BT
        loss = F.cross_entropy(model(batch.ids_BT)[at], batch.targets_BT[at])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def apart(folder: Path, weights: dict[str, torch.Tensor]) -> float:
    ours = saved(folder, LAST)["state_dict"]
    return max(float((ours[f"model.{n}"] - w).abs().max()) for n, w in weights.items())


@pytest.mark.parametrize("new", [False, True], ids=["moments of the parent", "new moments"])
def test_another_learning_rate_with_the_state_of_the_optimizer_or_without(parent, tmp_path, new):
    fields = [
        "--model.residual_dropout=0",
        "--optim.lr=0.002",
        "--optim.schedule=constant",
        *["--fork_new_moments=true"] * new,
    ]
    record = fork(parent, tmp_path / "fork", *fields)
    assert record["new_moments"] == new
    named = {c["field"]: (c["from"], c["to"]) for c in record["changed"]}
    assert named == {"model.residual_dropout": (0.1, 0.0), "optim.lr": (0.01, 0.002),
                     "optim.schedule": ("cosine", "constant")}  # fmt: skip
    losses, weights = by_hand(parent, 0.002, carry=not new)
    assert [line["loss"] for line in series(tmp_path / "fork", STEP)] == pytest.approx(losses, abs=1e-5)
    assert apart(tmp_path / "fork", weights) < (1e-5 if new else 2e-6)
    _, other = by_hand(parent, 0.002, carry=new)
    assert apart(tmp_path / "fork", other) > 1e-3  # the control


# Perturbation and identity ----------------------------------------------------------------------------------


def test_perturbation_has_its_size_and_is_a_function_of_its_number(parent, tmp_path):
    longer = ["--trainer.max_steps=9", "--optim.schedule_steps=12"]
    for name, draw in (("a", 1), ("again", 1), ("b", 2)):
        fork(parent, tmp_path / name, "--fork_noise=1e-4", f"--fork_seed={draw}", *longer)
    before = saved(parent, STEP)["state_dict"]
    a, again, b = (saved(tmp_path / n, STEP)["state_dict"] for n in ("a", "again", "b"))
    assert same(a, again)
    for name, weight in before.items():
        change = (a[name].double() - weight.double()).square().mean().sqrt()
        if weight.ndim == 2:
            assert float(change / weight.double().square().mean().sqrt()) == pytest.approx(1e-4, rel=1e-3)
            other = (b[name] - weight).double()
            cosine = F.cosine_similarity(other.flatten(), (a[name] - weight).double().flatten(), dim=0)
            assert abs(float(cosine)) < 5 / weight.numel() ** 0.5
        else:
            assert float(change) == 0
