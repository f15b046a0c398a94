"""Measures the cost of the monitors: the training stack without monitors, with monitors between two probes, with
probes, and with all monitors."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch._functorch import config as functorch

from benchmarks.harness import Candidate, Context, Unit, compare
from benchmarks.loops import Stack
from benchmarks.setups import QK_NORM, batches_of, facts_of, full, toy, work_of
from mmqk.config import MonitorConfig
from mmqk.training.module import TrainingModule

EVERYTHING = MonitorConfig(
    every_n_steps=1, heads=True, parameters=True, precision=True, gradient_agreement=True, budget_every_n_steps=50,
    budget_steps=50,
)  # fmt: skip


def units(context: Context) -> list[Unit]:
    """Return the units of this table."""
    return [Unit("monitors", "124M" if context.full else "demonstration", 400, _measure)]


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
