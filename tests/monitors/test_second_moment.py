"""Compares the ratio of the gradient to Adam's second moment with loops over elements and with a training loop in
torch."""

from __future__ import annotations

import pytest
import torch

from mmqk.config import MonitorConfig
from mmqk.monitors.own.callback import RunMonitor
from tests.training.toy import fit, module_of, toy_batch

STEPS, CLIP, LR, BETAS, EPS = 5, 0.05, 0.01, (0.9, 0.95), 1e-8
MONITOR = MonitorConfig(every_n_steps=2, probe_sequences=2, second_moment=True)


def written_out(clip: float | None) -> dict[int, float]:
    """Train with torch's AdamW, and return the expected ``w_q_grad_over_v`` of the first layer at each step.

    Adam's second moment is computed by hand, from the gradients.
    """
    model, moment, by_step = module_of().model, 0.0, {}
    weight = model.blocks[0].attention.w_q.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)
    for step in range(1, STEPS + 1):
        batch = toy_batch(step - 1)
        optimizer.zero_grad()
        logits = model(batch.ids_BT)[batch.target_mask_BT]
        torch.nn.functional.cross_entropy(logits, batch.targets_BT[batch.target_mask_BT]).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        moment = 0.95 * moment + 0.05 * weight.grad.square()
        ratio = weight.grad.square() / (moment / (1 - 0.95**step)).clamp_min(EPS**2)
        by_step[step] = float(ratio.mean().sqrt())
        optimizer.step()
    return by_step


@pytest.mark.parametrize("clip", [None, CLIP])
def test_a_run_logs_that_of_a_loop_written_out(clip, monkeypatch):
    logged: dict[int, dict[str, float]] = {}

    def keep(trainer, values) -> None:
        found = {tag: value for tag, value in values.items() if "grad_over_v" in tag}
        if found:
            logged[trainer.global_step] = found

    monkeypatch.setattr("mmqk.monitors.own.callback._log", keep)
    module = module_of(weight_decay=0.0)
    assert module.optim_config.beta2 == BETAS[1] and module.optim_config.eps == EPS
    fit(module, [toy_batch(step) for step in range(STEPS)], clip=clip, callbacks=[RunMonitor(MONITOR)])
    assert list(logged) == [2, 4, 5]
    expected, unclipped = written_out(clip), written_out(None)
    for step, line in logged.items():
        assert line["w_q_grad_over_v/layer00"] == pytest.approx(expected[step], rel=1e-5)
        if clip:  # control: the clipping factor differs between steps, so the ratio differs without clipping
            assert line["w_q_grad_over_v/layer00"] != pytest.approx(unclipped[step], rel=1e-4)
    names = {tag.partition("_grad_over_v")[0] for tag in logged[4]}
    assert names == {"w_q", "w_k", "w_v", "w_o", "w_gate", "w_up", "w_down", "embed", "head"}
