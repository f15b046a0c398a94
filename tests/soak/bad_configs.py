"""Random configurations on the command line: each trains two steps, diverges, or is refused by a sentence that names
a field.

If a configuration trains, a second run is trained from the config.yaml of the first one; both must have the same id
and metrics. The fields in `LEFT_OUT` are not changed.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from mmqk.config import SECTIONS, TrainerConfig
from mmqk.ranges import Range, range_of
from mmqk.store import EXIT_CODES, cli_main, read_metrics, read_run
from mmqk.train import main

CASES, QUICK, SECONDS = 3000, 40, 120.0
FIXED = {
    "--data.seq_len": "96", "--data.batch_size": "2", "--data.val_sequences": "4", "--model.d_model": "16",
    "--model.n_layers": "2", "--model.n_heads": "2", "--optim.warmup_steps": "1", "--trainer.max_steps": "2",
    "--data.mix": '{"dial": 1}', "--trainer.accelerator": "cpu", "--threads": "1", "--monitor.probe_sequences": "1",
}  # fmt: skip
# Fields that are not changed: they choose files or hardware, or set a number that need not vary in a run of two
# steps, such as the number of loader workers.
LEFT_OUT = {
    "data.pairs", "data.text", "data.tokenizers", "data.cache", "data.tokens", "data.workers", "trainer.max_steps",
    "trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy",
}  # fmt: skip
WRONG = (
    "nan",
    "inf",
    "-inf",
    "1e400",
    "-1",
    "0x10",
    "true",
    "wide",
    "null",
    "[]",
    "{}",
    '{"a": 1}',
    "[1, [2]]",
    "''",
    "1_0",
)
LARGE = 64  # the largest whole number that is tried; larger ones do not train in seconds


def leaves(kind: type, path: str) -> Iterator[tuple[str, Any, Range | None]]:
    """Return the path, type and range of every field."""
    hints = typing.get_type_hints(kind)
    for field in fields(kind):
        name, hint = f"{path}.{field.name}", hints[field.name]
        inner = [h for h in (hint, *typing.get_args(hint)) if is_dataclass(h)]
        if inner:
            yield from leaves(typing.cast(type, inner[0]), name)
        elif name not in LEFT_OUT:
            yield name, hint, range_of(field)


LEAVES = [
    leaf for name, kind in {**SECTIONS, "trainer": TrainerConfig}.items() for leaf in leaves(kind, name)
]


def value(rng: random.Random, hint: Any, limits: Range | None) -> str:
    """Return a value that the type allows, usually one in the range."""
    if rng.random() < 0.1:
        return rng.choice(WRONG)
    inner = typing.get_args(hint)
    if type(None) in inner:
        if rng.random() < 0.2:
            return "null"
        hint = next(h for h in inner if h is not type(None))
    if typing.get_origin(hint) is Literal:
        return str(rng.choice(typing.get_args(hint)))
    if hint is bool:
        return rng.choice(("true", "false"))
    if limits is not None:
        number = json.dumps(in_range(rng, limits, hint is int or int in typing.get_args(hint)))
        origin = typing.get_origin(hint)
        if hint in (int, float):
            return number
        if origin in (tuple, list):
            return f"[{number}]"
        return json.dumps({rng.choice(("text", "image", "dial")): json.loads(number)})
    return rng.choice(("text", "[text]", '{"text": 1}', '["text", "image"]'))


def in_range(rng: random.Random, limits: Range, whole: bool) -> float:
    low, high = limits.low, limits.high
    if rng.random() < 0.05:
        return rng.choice((low - 1, high * 2 + 1))
    if whole:
        return rng.choice((int(low), *range(int(low), int(min(high, low + 6)) + 1), int(min(high, LARGE))))
    ends = [max(low, 1e-4), min(high, 10.0)] if low >= 0 else [max(low, -10.0), min(high, 10.0)]
    near = rng.uniform(*ends) if ends[0] <= ends[1] else low
    return rng.choice((low, near, near, near, high, 0.0 if limits.zero else near))


def prepare(shared: Path) -> None:
    assert len(LEAVES) > 100, "fields of the configuration are not found"


def case(number: int, rng: random.Random, shared: Path, work: Path) -> str:
    chosen = rng.sample(LEAVES, rng.choice((1, 1, 2, 3, 5)))
    given = {f"--{name}": value(rng, hint, limits) for name, hint, limits in chosen}
    args = [f"{name}={text}" for name, text in {**FIXED, **given}.items()]
    code, told = call([*args, "--quiet", f"--out={work / 'run'}"])
    if code == EXIT_CODES["diverged"]:
        return "diverged"
    if code != 0:
        last = [line for line in told.splitlines() if line.startswith("mmqk")]
        assert code == 2 and "Traceback" not in told and len(last) == 1, f"{given}: exit code {code}: {told}"
        named = [part for name in given for part in (name.removeprefix("--"), name.rpartition(".")[2])]
        assert any(name in last[0] for name in named), f"{given}: no field is named: {last[0]}"
        return "refused"
    again, told = call([f"--config={work / 'run/config.yaml'}", "--quiet", f"--out={work / 'again'}"])
    assert again == 0, f"{given}: the run of its config.yaml ends with exit code {again}: {told}"
    one, other = (read_run(work / name) for name in ("run", "again"))
    assert one is not None and other is not None and one["id"] == other["id"], f"{given}: another identity"
    assert same(series(work / "run"), series(work / "again")), f"{given}: config.yaml trains another run"
    assert len(series(work / "run")) == 3, f"{given}: {len(series(work / 'run'))} lines of metrics"
    return "trained"


def call(args: list[str]) -> tuple[int, str]:
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        try:
            code = cli_main(main)(args)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return code, told.getvalue()


def series(folder: Path) -> list[dict[str, float]]:
    return [
        {k: v for k, v in line.items() if k != "tokens_per_s"}
        for line in read_metrics(folder / "metrics.jsonl")
    ]


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal; NaN equals NaN."""
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
