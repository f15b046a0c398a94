"""Compares one model in a bare loop, in mmqk's training stack, in transformers and in litgpt."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.apart import Apart
from benchmarks.harness import Candidate, Context, Unit, compare
from benchmarks.loops import Stack
from benchmarks.others import bare_loop, litgpt_loop, transformers_loop
from benchmarks.setups import QK_NORM, batches_of, facts_of, full, toy, work_of
from mmqk.config import MonitorConfig, RunConfig

BASE = "mmqk: data, monitors, alarms, logs"
CHAMELEON = "--model.qk_norm={kind: layer, bias: true}"
CHUNK, TOY_CHUNK = 8192, 512
NONE = MonitorConfig(every_n_steps=0)


def units(context: Context) -> list[Unit]:
    """Return the units of this table."""
    if not context.full:
        return [
            Unit("peers", "demonstration-rms", 50, partial(_toy, flag=QK_NORM, theirs="Qwen3")),
            Unit("peers", "demonstration-apart", 50, _apart),
            Unit("peers", "demonstration-chameleon", 50, partial(_toy, flag=CHAMELEON, theirs="Chameleon")),
        ]
    return [
        Unit("peers", "124M-rms", 800, partial(_full, size="124M", flag=QK_NORM, theirs="Qwen3")),
        Unit("peers", "124M-chameleon", 600, partial(_full, size="124M", flag=CHAMELEON, theirs="Chameleon")),
        Unit("peers", "350M-rms", 800, partial(_full, size="350M", flag=QK_NORM, theirs="Qwen3", batch=16)),
    ]


def _toy(context: Context, flag: str, theirs: str) -> dict[str, Any]:
    run = toy(context, flag)
    candidates = candidates_of(run, context, theirs, compiled=context.compiled, eager=True)
    return {
        "title": f"the demonstration with QK-Norm {run.model.qk_norm.kind}, as {theirs}",
        "facts": facts_of(run, context.device),
        "base": BASE,
        "rows": compare(candidates, context, repeat=20, rounds=7),
    }


def _full(context: Context, size: str, flag: str, theirs: str, batch: int = 32) -> dict[str, Any]:
    run = full(size, flag, batch=batch)
    candidates = candidates_of(run, context, theirs, compiled=True, eager=size != "350M")
    return {
        "title": f"{size}, T {run.data.seq_len:,}, {run.model.vocab_size:,} ids, QK-Norm {run.model.qk_norm.kind}",
        "facts": facts_of(run, context.device),
        "base": BASE,
        "rows": compare(candidates, context, repeat=30, rounds=4, warm=4),
    }


def _alone(run: RunConfig) -> Stack:
    return Stack(run, monitor=NONE, batches=batches_of(run))


def _apart(context: Context) -> dict[str, Any]:
    run = toy(context, QK_NORM)
    candidates = [
        replace(candidate, build=partial(Apart, candidate.build, context.threads), memory=False)
        for candidate in candidates_of(run, context, "Qwen3", compiled=False, eager=True)
    ]
    return {
        "title": "the demonstration with QK-Norm rms, each row in a separate process",
        "facts": facts_of(run, context.device),
        "base": BASE,
        "rows": compare(candidates, context, repeat=20, rounds=7),
    }


def candidates_of(run: RunConfig, context: Context, theirs: str, compiled: bool, eager: bool) -> list[Candidate]:
    """Return the candidates. The candidates of mmqk are compiled if `run.compile` is true.

    Args:
        run: the run whose model, data and optimizer are measured.
        context: device and size.
        theirs: name of the model in transformers.
        compiled: whether to measure compiled rows of the other packages.
        eager: whether to measure eager rows of the other packages.
    """
    device, work = context.device, work_of(run)
    chunk = CHUNK if context.full else TOY_CHUNK
    chunked = replace(run, loss=replace(run.loss, chunk_size=chunk))
    probed = run.monitor.every_n_steps  # steps per turn, so that each turn has one probe

    m = run.monitor
    note = f"with a probe of {m.probe_sequences} sequences every {m.every_n_steps} steps; the others have none"
    bare = partial(bare_loop, run, device)
    candidates = [
        Candidate("bare loop", bare, work, compiled=run.compile),
        Candidate("mmqk: Lightning alone", partial(_alone, run), work, compiled=run.compile),
        Candidate(BASE, partial(Stack, run), work, repeat=probed, compiled=run.compile, note=note),
        Candidate(
            f"the same, loss.chunk_size {chunk:,}", partial(Stack, chunked), work, repeat=probed, compiled=run.compile
        ),
    ]
    if context.full:
        note = "transformers and litgpt leave the kernel to torch, which may take cuDNN's on Hopper"
        cudnn = replace(run, backend="sdpa_cudnn")
        name = "the same, sdpa_cudnn"
        build = partial(Stack, cudnn)
        candidates.append(Candidate(name, build, work, repeat=probed, compiled=run.compile, note=note))
    if compiled and eager:
        whole = partial(bare, whole=True)
        candidates.append(Candidate("bare loop, forward and loss one graph", whole, work, compiled=True))
    others = {f"transformers {theirs}": transformers_loop}
    if run.model.qk_norm.kind == "rms":
        others["litgpt"] = litgpt_loop
    for name, loop in others.items():
        if eager:
            candidates.append(Candidate(name, partial(loop, run, device, False), work))
        if compiled:
            candidates.append(Candidate(f"{name}, compiled", partial(loop, run, device, True), work, compiled=True))
    return candidates
