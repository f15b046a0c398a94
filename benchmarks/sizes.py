"""Measures time and memory by model size, sequence length and vocabulary. The training stack runs without monitors,
with dense and chunked loss."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.harness import Candidate, Context, Unit, compare
from benchmarks.loops import Stack
from benchmarks.setups import QK_NORM, SIZES, batches_of, facts_of, full, parameters_of, toy, work_of
from mmqk.config import MonitorConfig, RunConfig

FULL = (1024, 4096), (16384, 65536)  # lengths and vocabularies
TOY = (128, 512), (1024, 4096)
CHUNK = 8192
TOKENS = {"25M": 32768, "124M": 32768, "350M": 16384}  # per step
SECONDS = {"25M": 220, "124M": 300, "350M": 420}


def units(context: Context) -> list[Unit]:
    """Return the units of this table."""
    names = list(SIZES) if context.full else ["demonstration"]
    return [Unit("sizes", name, SECONDS.get(name, 30), partial(_measure, size=name)) for name in names]


def _measure(context: Context, size: str) -> dict[str, Any]:
    lengths, vocabularies = FULL if context.full else TOY
    candidates: list[Candidate] = []
    facts: dict[str, Any] = {}
    for tokens in lengths:
        for vocabulary in vocabularies:
            run = _run(context, size, tokens, vocabulary)
            facts = facts or facts_of(run, context.device)
            label = f"T {tokens:,}, {vocabulary // 1024}k ids"
            candidates.append(_way(label, run, context))
            chunk = CHUNK if context.full else 256
            chunked = replace(run, loss=replace(run.loss, chunk_size=chunk))
            candidates.append(_way(f"{label}, loss.chunk_size {chunk:,}", chunked, context, against=label))
    return {
        "title": size if context.full else "the demonstration",
        "facts": {k: v for k, v in facts.items() if k not in ("parameters", "model", "tokens_a_step")},
        "base": None,
        "rows": compare(candidates, context, repeat=20 if context.full else 5, rounds=3, warm=3),
    }


def _run(context: Context, size: str, tokens: int, vocabulary: int) -> RunConfig:
    if context.full:
        return full(size, QK_NORM, tokens=tokens, batch=TOKENS[size] // tokens, vocabulary=vocabulary)
    half = vocabulary // 2
    return toy(
        context, QK_NORM, "--data.mix={dial: 1.0}", f"--data.dial.vocabulary={{text: {half}, image: {half}}}",
        "--data.dial.entropy={text: 4.0, image: 4.0}", f"--data.seq_len={tokens}",
        f"--data.batch_size={1024 // tokens}",
        f"--data.dial.tokens={{text: {tokens // 2}, image: {tokens // 2}}}", "--monitor.probe_split=current",
        "--monitor.probe_sequences=1",
    )  # fmt: skip


def _way(name: str, run: RunConfig, context: Context, against: str | None = None) -> Candidate:
    def build() -> Stack:
        none = MonitorConfig(every_n_steps=0)
        return Stack(run, monitor=none, batches=batches_of(run))

    return Candidate(
        name, build, work_of(run) | {"parameters": parameters_of(run)}, against=against, compiled=run.compile
    )
