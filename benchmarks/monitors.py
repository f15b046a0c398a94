"""Measures the cost of the monitors: the training stack without monitors, with monitors between two probes, with
probes, and with all monitors; and a bare loop without and with `attach`, between two probes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch._functorch import config as functorch
from torch.nn.functional import cross_entropy

from benchmarks.harness import Candidate, Context, Unit, compare, seconds_of
from benchmarks.loops import Loop, Stack, ids_and_labels
from benchmarks.setups import QK_NORM, batches_of, facts_of, full, toy, work_of
from mmqk.config import MonitorConfig
from mmqk.monitors import Watch, attach
from mmqk.training.module import TrainingModule

EVERYTHING = MonitorConfig(
    every_n_steps=1, heads=True, parameters=True, precision=True, gradient_agreement=True, budget_every_n_steps=50,
    budget_steps=50,
)  # fmt: skip


def units(context: Context) -> list[Unit]:
    """Return the units of this table."""
    name = "124M" if context.full else "demonstration"
    return [Unit("monitors", name, 400, _measure), Unit("monitors", "attach", 120, _attach)]


def _measure(context: Context) -> dict[str, Any]:
    run = full("124M", QK_NORM) if context.full else toy(context)
    every = 100 if context.full else 10
    batches = batches_of(run)

    @cache  # shared by all rows, because the memory addresses of the weights change the time by 1 to 2 %
    def module() -> TrainingModule:
        return TrainingModule.of(replace(run, monitor=EVERYTHING))

    def candidate(name: str, monitor: MonitorConfig, repeat: int) -> Candidate:
        def build() -> Stack:
            return Stack(run, module=module(), monitor=monitor, batches=batches)

        return Candidate(name, build, work_of(run), repeat=repeat, memory=False)

    steps = 100 if context.full else 20
    candidates = [
        candidate("off", MonitorConfig(every_n_steps=0), steps),
        candidate("on, between two probes", MonitorConfig(every_n_steps=10**9), steps),
        candidate(f"a probe every {every} steps", MonitorConfig(every_n_steps=every), steps),
        candidate("a probe every step", MonitorConfig(every_n_steps=1), 10),
        candidate("everything, every step", EVERYTHING, 10),
    ]
    kept = functorch.donated_buffer, torch.compiler.config.cache_key_tag
    try:
        rows = compare(candidates, context, repeat=steps, rounds=5 if context.full else 9)
    finally:
        functorch.donated_buffer, torch.compiler.config.cache_key_tag = kept
    return {
        "title": "124M" if context.full else "the demonstration",
        "facts": facts_of(run, context.device) | {"probe": f"{MonitorConfig().probe_sequences} sequences"},
        "base": "off",
        "rows": rows,
    }


class _Watched:
    """A bare loop that a watch without probes may follow.

    Args:
        loop: the loop, which all rows share.
        model: its model.
        watches: the newest watch is the one that the loop's loss calls.
        modality: the ids of images; None for no watch.
    """

    def __init__(self, loop: Loop, model: torch.nn.Module, watches: list[Watch], modality: dict[str, range] | None):
        self.loop, self.model, self.watches, self.modality = loop, model, watches, modality

    def __call__(self, n: int) -> float:
        self.watches.clear()
        if self.modality is None:
            return seconds_of(self.loop.step, n, self.loop.device)
        watch = attach(self.model, modality=self.modality, every_n_steps=0, optimizer=self.loop.optimizer)
        self.watches.append(watch)

        def step() -> None:
            self.loop.step()
            watch.step()

        seconds = seconds_of(step, n, self.loop.device)
        watch.close()
        return seconds


def _attach(context: Context) -> dict[str, Any]:
    run = full("124M", QK_NORM, "--compile=false") if context.full else toy(context)
    model = TrainingModule.of(run).to(context.device).train().model
    watches: list[Watch] = []
    what = ["nothing"]  # what the loop gives to `Watch.loss`

    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        ids_BT, labels_BT = batch
        logits_BTV = model(ids_BT)
        losses_BT = cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="none").view_as(labels_BT)
        if watches and what[0] != "nothing":
            watches[0].loss(logits_BTV if what[0] == "logits" else losses_BT, labels_BT)
        return losses_BT.sum() / (labels_BT >= 0).sum()

    loop = Loop(model, loss, ids_and_labels(run, context.device), run, context.device)
    images = {"image": range(run.model.vocab_size // 2, run.model.vocab_size)}

    def candidate(name: str, given: str, modality: dict[str, range] | None) -> Candidate:
        watched = _Watched(loop, model, watches, modality)

        def take(n: int) -> float:
            what[0] = given
            return watched(n)

        return Candidate(name, lambda: take, work_of(run), memory=False)

    candidates = [
        candidate("a bare loop", "nothing", None),
        candidate("attach(optimizer=)", "nothing", images),
        candidate("attach(optimizer=), loss of each token", "losses", images),
        candidate("attach(optimizer=), logits", "logits", images),
    ]
    return {
        "title": "attach between two probes",
        "facts": facts_of(run, context.device),
        "base": "a bare loop",
        "rows": compare(candidates, context, repeat=100, rounds=9),
    }
