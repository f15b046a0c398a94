"""The same model elsewhere: a bare loop of the same blocks, the training stack, transformers, litgpt."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.harness import Context, Unit, Way, compare
from benchmarks.loops import Stack
from benchmarks.others import bare_loop, litgpt_loop, transformers_loop
from benchmarks.setups import QK_NORM, batches_of, facts_of, full, toy, work_of
from mmqk.config import RunConfig
from mmqk.monitors import MonitorConfig

BASE = "mmqk: data, monitors, alarms, logs"
CHAMELEON = "--model.qk_norm={kind: layer, bias: true}"
CHUNK = 4096
NONE = MonitorConfig(every_n_steps=0)


def units(context: Context) -> list[Unit]:
    """Of this table."""
    if not context.full:
        return [
            Unit("peers", "demonstration-rms", 50, partial(_toy, flag=QK_NORM, theirs="Qwen3")),
            Unit("peers", "demonstration-chameleon", 50, partial(_toy, flag=CHAMELEON, theirs="Chameleon")),
        ]
    return [
        Unit("peers", "124M-rms", 420, partial(_full, size="124M", flag=QK_NORM, theirs="Qwen3")),
        Unit("peers", "124M-chameleon", 330, partial(_full, size="124M", flag=CHAMELEON, theirs="Chameleon")),
        Unit("peers", "350M-rms", 420, partial(_full, size="350M", flag=QK_NORM, theirs="Qwen3", batch=16)),
    ]


def _toy(context: Context, flag: str, theirs: str) -> dict[str, Any]:
    run = toy(context, flag)
    ways = ways_of(run, context, theirs, compiled=context.compiled, eager=True)
    return {
        "title": f"the demonstration with QK-Norm {run.model.qk_norm.kind}, as {theirs}",
        "facts": facts_of(run),
        "base": BASE,
        "rows": compare(ways, context, repeat=20, rounds=7),
    }


def _full(context: Context, size: str, flag: str, theirs: str, batch: int = 32) -> dict[str, Any]:
    run = full(size, flag, batch=batch)
    ways = ways_of(run, context, theirs, compiled=True, eager=size != "350M")
    return {
        "title": f"{size}, T {run.data.seq_len:,}, {run.model.vocab_size:,} ids, QK-Norm {run.model.qk_norm.kind}",
        "facts": facts_of(run),
        "base": BASE,
        "rows": compare(ways, context, repeat=30, rounds=4, warm=4),
    }


def ways_of(run: RunConfig, context: Context, theirs: str, compiled: bool, eager: bool) -> list[Way]:
    """The rows. On a GPU the blocks of mmqk's own are compiled in place.

    Args:
        run: the model, its data and its optimizer.
        context: device and size.
        theirs: what transformers calls it.
        compiled: whether the compiled rows of the others are wanted.
        eager: whether the uncompiled ones are.
    """
    device, blocks, work = context.device, context.full, work_of(run)
    probed = run.monitor.every_n_steps  # so many steps that one probe falls into each turn

    def bare(how: str) -> Any:
        return lambda: bare_loop(run, device, how)

    def stack(of: RunConfig, memory: bool = False) -> Any:
        def make() -> Stack:
            if memory:
                return Stack(of, monitor=NONE, batches=batches_of(of), compiled=blocks)
            return Stack(of, compiled=blocks)

        return make

    chunked = replace(run, loss=replace(run.loss, chunk=CHUNK))
    ways = [
        Way("bare loop", bare("blocks" if blocks else ""), work, compiled=blocks),
        Way("mmqk: Lightning alone", stack(run, memory=True), work, compiled=blocks),
        Way(BASE, stack(run), work, repeat=probed, compiled=blocks),
    ]
    if context.full:
        ways.append(
            Way(f"the same, loss.chunk {CHUNK}", stack(chunked), work, repeat=probed, compiled=blocks)
        )
    if compiled and eager:
        ways.append(Way("bare loop, forward and loss one graph", bare("all"), work, compiled=True))
    others = {f"transformers {theirs}": transformers_loop}
    if run.model.qk_norm.kind == "rms":
        others["litgpt"] = litgpt_loop
    for name, loop in others.items():
        if eager:
            ways.append(Way(name, partial(loop, run, device, False), work))
        if compiled:
            ways.append(Way(f"{name}, compiled", partial(loop, run, device, True), work, compiled=True))
    return ways
