"""Damaged files of runs, grids, packs, pages, models, tokenizers, archives and token folders.

Each case copies a small project, damages one or two files of it, and runs one command that reads them. The command
must refuse the file with one sentence that names it or its folder, give the result of the undamaged project, or name
what it left out. If the damaged file is still a valid record, the command cannot detect the damage: then it must only
end without a traceback.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

import mmqk
from mmqk import ablate, inspect, pack, watch
from mmqk.data import tokenize
from mmqk.interop import __main__ as interop
from mmqk.report import __main__ as report
from mmqk.train import main
from tests.soak.bad_shards import ADDRESSES, called
from tests.soak.file_layer import leave_figures_out
from tests.soak.kills import BASE, DIAL, LAST, STEPS, Killer, in_child, metrics
from tests.soak.shard_damage import flipped
from tests.store.test_store_damage import DAMAGE, VALUES, places
from tests.tiny import tiny_args, write_tiny_data

CASES, QUICK, SECONDS = 2000, 30, 120.0
LARGE = 2**32  # bytes of a sparse file; a reader that loads all of it exceeds `ADDRESSES`
EARLIER = "checkpoints/step00000004.ckpt"
RECORDS = (".json", ".jsonl", ".yaml")


def train(*args: str, out: str = "out") -> tuple[int, str, Any]:
    code, told = called(main, [*tiny_args(Path("data")), *BASE, *args, f"--out={out}"])
    return code, told, None if code else trained(Path(out))


def trained(run: Path) -> Any:
    weights = torch.load(run / LAST, weights_only=True)["state_dict"]
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in weights.values())).hexdigest()
    return json.dumps([metrics(run), digest])


def page(runs: str, out: str = "out") -> tuple[int, str, Any]:
    code, told = called(report.main, [runs, f"--out={out}"])
    texts = [Path(out, name).read_text() for name in ("report.md", "verdicts.json")] if not code else []
    return code, told, json.dumps(texts)


def watched(*runs: str) -> tuple[int, str, Any]:
    code, told = called(watch.main, ["--once", *runs])
    return code, told, told


def grid() -> tuple[int, str, Any]:
    ablate.start_server = lambda *_: None  # type: ignore[assignment]
    code, told = called(ablate.main, ["--config=grid.yaml", "--out=grid", "--jobs=1"])
    return code, told, None if code else page("grid")[2]


def converted(source: str) -> tuple[int, str, Any]:
    code, told = called(interop.main, [f"--from={source}", "--to=out"])
    names = sorted(path for path in Path("out").rglob("*") if path.is_file())
    weights = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in names if path.suffix != ".lock"}
    return code, told, None if code else json.dumps(weights)


def packed() -> tuple[int, str, Any]:
    code, told = called(pack.main, ["grid", "--out=out.zip"])
    if code:
        return code, told, None
    return code, told, hashlib.sha256(Path("out.zip").read_bytes()).hexdigest()


def frames() -> tuple[int, str, Any]:
    tables: list[str] = []

    def read(_: Any) -> int:
        runs = mmqk.load_runs("grid")
        tables.extend(table.to_csv() for table in (runs.metrics(), runs.summary()))
        return 0

    code, told = called(read)
    return code, told, json.dumps(tables)


def inspected() -> tuple[int, str, Any]:
    flags = [flag for flag in tiny_args(Path("data")) if flag.startswith("--data.")]
    code, told = called(inspect.main, [*flags, "--out=out"])
    return code, told, told


Reader = Callable[[], tuple[int, str, Any]]
# Each command, and the parts of the project that it reads.
READERS: dict[str, tuple[Reader, tuple[str, ...]]] = {
    "resume": (lambda: train(out="run"), ("run", "run", "data/cache", "data/tokenizers")),
    "train": (lambda: train(), ("data/pairs", "data/text", "data/tokenizers", "data/cache")),
    "train on tokens": (lambda: train("--data.pairs=tokens", '--data.mix={"pair": 1}'), ("tokens",)),
    "fork": (lambda: train(f"--fork=run/{EARLIER}", "--optim.lr=0.02"), ("run",)),
    "report": (lambda: page("run"), ("run",)),
    "report on a grid": (lambda: page("grid"), ("grid",)),
    "report on a pack": (lambda: page("pack.zip"), ("pack.zip",)),
    "report again": (lambda: page("grid", "page"), ("page",)),
    "watch": (lambda: watched("run", "grid"), ("run", "grid")),
    "ablate": (grid, ("grid", "grid.yaml", "base.json")),
    "pack": (packed, ("grid",)),
    "load_runs": (frames, ("grid",)),
    "export": (lambda: converted("run"), ("run/checkpoints", "run/run.json", "run/config.yaml", "data/tokenizers")),
    "import": (lambda: converted("model"), ("model",)),
    "inspect": (inspected, ("data/pairs", "data/text", "data/tokenizers", "data/cache")),
}  # fmt: skip


def prepare(shared: Path) -> None:
    """Create the project, and store the result of each reader."""
    (shared / "tree/data").mkdir(parents=True)
    os.chdir(shared / "tree")
    write_tiny_data(Path("data"))
    leave_figures_out()
    assert not in_child(make)
    for path in Path().rglob("*"):
        os.utime(path, (1e9, 1e9))  # a run whose files were just written counts as running
    for name, (read, _) in READERS.items():
        shutil.copytree(shared / "tree", shared / name)

        def keep(name: str = name, read: Reader = read) -> int:
            os.chdir(shared / name)
            code, told, product = read()
            assert code == 0 and product, f"{name}: {told}"
            (shared / f"{name}.json").write_text(json.dumps(product))
            return 0

        assert not in_child(keep)
        shutil.rmtree(shared / name)


def make() -> int:
    """Write all parts of the project into the current folder."""
    in_child(lambda: train("--checkpoint.keep=9", out="parent")[0])
    # A run that was killed while it wrote its last checkpoint.
    killed = Killer(Path("run"), site=("replace", "checkpoints/step0.partial"), nth=STEPS // 2 - 1)

    def until_killed() -> int:
        with killed.mounted():
            return train("--checkpoint.keep=9", out="run")[0]

    assert in_child(until_killed), "the run was not killed"
    fields = [part.removeprefix("--").partition("=") for part in (*BASE, *DIAL) if part != "--quiet"]
    Path("base.json").write_text(json.dumps({name: yaml.safe_load(value) for name, _, value in fields}))
    claim = {"id": "A", "statement": "more", "metric": "largest_attention_logit", "treatment": "b", "control": "a",
             "min_effect": 0.4}  # fmt: skip
    arms = {"a": {}, "b": {"set": {"optim.lr": 0.02}}}
    text = {"name": "grid", "seeds": [1, 2], "arms": arms, "claims": [claim], "base": ["base.json"]}
    Path("grid.yaml").write_text(yaml.safe_dump(text))
    command = ["--config=grid.yaml", "--out=grid", "--jobs=2"]
    subprocess.run([sys.executable, "-m", "mmqk.ablate", *command], check=True, stdout=subprocess.DEVNULL)
    in_child(lambda: pack.main(["grid", "--out=pack.zip"]))
    in_child(lambda: page("grid", "page")[0])
    in_child(lambda: interop.main(["--from=parent", "--to=model"]))
    flags = ["--shards", "data/pairs/train-00000.tar", "--out=tokens", "--tokenizers=data/tokenizers", "--workers=0"]
    in_child(lambda: tokenize.main([*flags, "--val-fraction=0.5"]))
    shutil.rmtree("parent")
    return 0


def damage(rng: random.Random, path: Path) -> tuple[str, bool]:
    """Damage a file. Return a description of the damage, and whether the file is still a valid record."""
    content = path.read_bytes()
    record = path.suffix in RECORDS
    kinds = ["cut", "flip", "flip", "other", "missing", "twice", "text", "swap", "large"]
    kind = rng.choice([*kinds, *(["value"] * 4 + ["number"] * 2 + ["lines"] if record else [])])
    if kind == "cut":
        path.write_bytes(content[: rng.randrange(len(content) + 1)])
    elif kind == "flip":
        path.write_bytes(flipped(content, rng) if content else b"x")
    elif kind == "missing":
        path.unlink()
    elif kind == "twice":
        path.write_bytes(content + content)
    elif kind == "text":
        path.write_bytes(rng.choice(list(DAMAGE.values())))
    elif kind == "swap":
        other = rng.choice([p for p in sorted(Path().rglob("*")) if p.is_file() and p != path])
        path.write_bytes(other.read_bytes())
        kind += f" with {other}"
    elif kind == "large":
        os.truncate(path, LARGE)
    elif kind == "other":
        path.unlink()
        makes = (path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to(path.name),
                 lambda: path.symlink_to("gone"), lambda: path.symlink_to("/dev/zero"))  # fmt: skip
        rng.choice(makes)()
    elif kind == "lines":
        lines = content.splitlines(keepends=True)
        at = rng.randrange(len(lines))
        half = lines[at][: len(lines[at]) // 2]
        lines[at : at + 1] = rng.choice(([], [lines[at]] * 2, [half], [b"\n"], [b"\0" * 99]))
        path.write_bytes(b"".join(lines))
    elif kind == "number":
        digits = [i for i, byte in enumerate(content) if 48 <= byte <= 57] or [0]
        at = rng.choice(digits)
        new = rng.choice((b"9" * 400, b"1e999", b"NaN", b"-1", b"9" * 6000, b"[" * 100_000, b'"1"', b"null"))
        path.write_bytes(content[:at] + new + content[at + 1 :])
    else:
        kind += f": {changed(rng, path, content)}"
    return kind, record and valid(path)


def changed(rng: random.Random, path: Path, content: bytes) -> str:
    """Change or remove one value of a record, or of one line of records."""
    lines = content.decode().splitlines() if path.suffix == ".jsonl" else [content.decode()]
    if not lines:
        return "none"
    line = rng.randrange(len(lines))
    record = yaml.safe_load(lines[line])
    inside = [place for place in places(record) if place]
    if not inside:
        return "none"
    at = rng.choice(inside)
    holder = record
    for name in at[:-1]:
        holder = holder[name]
    new = rng.choice((*VALUES, *VALUES, "gone"))
    if new == "gone":
        del holder[at[-1]]
    else:
        holder[at[-1]] = new
    lines[line] = yaml.safe_dump(record) if path.suffix == ".yaml" else json.dumps(record)
    path.write_text("\n".join(lines) + "\n")
    return f"{at} = {new!r:.40}"


def valid(path: Path) -> bool:
    """Return whether each record of a file can be read."""
    try:
        text = path.read_text() if path.is_file() and path.stat().st_size < LARGE else "["
        for part in text.splitlines() if path.suffix == ".jsonl" else [text]:
            yaml.safe_load(part) if path.suffix == ".yaml" else json.loads(part)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return False
    return True


def case(number: int, rng: random.Random, shared: Path, work: Path) -> str:
    leave_figures_out()
    shutil.copytree(shared / "tree", work, dirs_exist_ok=True)
    os.chdir(work)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ADDRESSES, resource.RLIM_INFINITY))
    name = list(READERS)[number % len(READERS)]
    read, parts = READERS[name]
    paths, done, plausible = [], [], False
    for _ in range(rng.choice((1, 1, 1, 1, 2))):
        part = Path(rng.choice(parts))
        inside = [part, *sorted(part.rglob("*"))]
        files = [path for path in inside if path.is_file() and not path.is_symlink()]
        if not files:
            continue
        # Choose the file type first, because there are many shards and arrays.
        suffix = rng.choice(sorted({p.suffix for p in files}))
        path = rng.choice([p for p in files if p.suffix == suffix])
        if path in paths:
            continue
        what, still = damage(rng, path)
        paths.append(path)
        done.append(f"{path}: {what}")
        # A tokenizer has no checksum: if it changes, the data are tokenized again. Models of other tools
        # have no checksum either.
        unchecked = name != "resume" and path.parent.name in ("tokenizers", "model")
        plausible |= still or unchecked
    fault = f"{name} after {'; '.join(done)}"
    try:
        code, told, product = read()
    except BaseException as error:
        raise AssertionError(fault) from error
    near = {part for path in paths for part in (path.name, path.parent.name, path.parent.parent.name) if part}
    near |= {"grid.yaml"} if Path("base.json") in paths else set()  # it names base.json
    if code:
        assert any(part in told for part in near), f"{fault}: the file is not named: {told}"
        return f"{name}: refused"
    if product == json.loads((shared / f"{name}.json").read_text()):
        return f"{name}: as undamaged"
    if any(path.name in told or path.name in product for path in paths):
        return f"{name}: named"
    # A token cache is made again, and an older checkpoint is exported; the message names the folder or checkpoint.
    folders = [path.parent for path in paths if "cache" in path.parts or path.parent.name == "checkpoints"]
    if any(folder.name in told for folder in folders):
        return f"{name}: replaced"
    assert plausible, f"{fault}: another result without a message: {told}"
    return f"{name}: another valid record"
