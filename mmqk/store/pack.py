"""A pack: a zip file with everything that the report of a folder of runs needs.

A pack has the records, metrics and alarms of every run, and the registration of the grid, but no checkpoints or
TensorBoard events. Its command lines and base configs have no absolute paths, because packs are shared. Two packs of
the same runs have the same bytes, and the report of a pack equals the report of the folder.

The zip file has one member, ``runs.tar``, in which files with the same name follow each other. The files of different
runs are similar, so one compressed stream for all files is up to 2.5 times smaller than one stream per file. Metrics
are stored as columns (`to_columns`), which are another quarter smaller.

A file of columns is one JSON object. ``shapes`` lists the different sequences of keys that lines have. ``lines`` has
the index of each line's shape. ``values`` has the values of each key in the order of the lines.
"""

from __future__ import annotations

import atexit
import io
import json
import lzma
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from mmqk.store.errors import OneSentenceParser, UserError, reason_of
from mmqk.store.files import find_file, json_line, write_atomic
from mmqk.store.folder import ABLATION_NAME, find_runs, read_ablation
from mmqk.store.formatting import without_roots
from mmqk.store.metrics import METRICS_NAME, parse_line, with_floats

TAR = "runs.tar"
THINNED = "thinned.json"
COLUMNS_NAME = "metrics.columns.json"
FILES = ("run.json", "status.json", METRICS_NAME, "alarms.jsonl", "config.yaml", "data.json", "fork.json",
         "skipped.json", THINNED)  # fmt: skip
# A report and its claims read these statistics and those that start with val_.
REPORTED = {
    "loss", "excess", "grad_norm", "alarm", "attn_logit_absmax", "attn_logit_bound", "attn_logit_mean",
    "attn_logit_offset_var", "attn_logit_spread_var", "attn_mass", "attn_entropy", "attn_rank",
    "logit_alignment", "logit_k_power", "logit_q_power", "q_norm", "k_norm", "v_norm", "resid_norm", "attn_out_norm",
    "mlp_out_norm", "final_norm", "final_rms", "out_log_z", "w_q_stable_rank", "w_k_stable_rank", "w_q_grad_over_v",
    "w_k_grad_over_v", "w_q_growth", "w_k_growth", "w_q_growth_total", "w_k_growth_total", "w_q_sq", "w_k_sq",
    "budget_window", "tokens_per_s",
}  # fmt: skip
# Significant digits of a value, and decimals of a training loss, in a small pack. Small packs are for hundreds of
# runs.
FEW_DIGITS, LOSS_DECIMALS = 5, 3
LOSSES = ("loss", "excess")
_DATE = (1980, 1, 1, 0, 0, 0)

DESCRIPTION = """\
Write the files that a report needs from a folder of runs into one small zip file: configurations, status, metrics,
alarms and the registration of the claims; no checkpoints and no TensorBoard events. mmqk report and mmqk.load_runs
read the file like the folder, and mmqk ablate --from continues the grid from it.

The report of a pack with the name of its folder equals the report of the folder byte for byte, unless --small rounds
its numbers."""


def main(argv: list[str] | None = None) -> int:
    """Pack runs into one file and print its path.

    Raises:
        UserError: the folder has no runs, its ablation.json is damaged, or --out is not a file name that ends in
            .zip.
    """
    parser = OneSentenceParser(prog="mmqk pack", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("runs", type=Path, help="folder of a grid, an arm or a run")
    parser.add_argument("--out", type=Path, help="the output file (default: the folder's name and .zip)")
    parser.add_argument(
        "--small",
        action="store_true",
        help=f"a smaller file for hundreds of runs: only the series that a report reads, with {FEW_DIGITS} digits",
    )
    options = parser.parse_args(argv)
    out = options.out or Path(f"{options.runs.resolve().name}.zip")
    if out.suffix != ".zip" or out.is_dir():
        raise UserError(f"--out {out} is not the name of a zip file: let it end in .zip")
    read_ablation(options.runs)  # no command can read a pack with a damaged registration
    write_pack(options.runs, out, options.small)
    size = out.stat().st_size
    print(f"{out}: {size / 1e6:.1f} MB" if size >= 1e5 else f"{out}: {size / 1e3:.0f} kB")
    return 0


def write_pack(
    folder: Path,
    out: Path,
    small: bool = False,
    only: Iterable[str] = REPORTED,
    digits: int = FEW_DIGITS,
    steps: int = 1,
) -> None:
    """Write a pack of all runs under ``folder``.

    Args:
        small: pack only some statistics, with few digits; losses of training steps with 3 decimals.
        only: the statistics of a small pack, besides those of the validation.
        digits: significant digits of a small pack.
        steps: in a small pack, a training loss, except the first, is the mean over this number of steps.

    Raises:
        UserError: the folder does not exist or has no runs.
    """
    content: dict[str, bytes] = {}
    if (folder / ABLATION_NAME).exists():
        content[ABLATION_NAME] = _without_paths((folder / ABLATION_NAME).read_bytes(), "grid", "base")
    for run in find_runs(folder):
        name = run.relative_to(folder).as_posix()
        for file in FILES:
            if (run / file).exists():
                content[str(PurePosixPath(name, file))] = (run / file).read_bytes()
        if (stored := str(PurePosixPath(name, "run.json"))) in content:
            content[stored] = _without_paths(content[stored], "details", "command")
        path = str(PurePosixPath(name, METRICS_NAME))
        if small and path in content and not (run / THINNED).exists():
            content[path] = _small(content[path], set(only), digits, steps)
            record = {"digits": digits, "loss_decimals": LOSS_DECIMALS, "loss_steps": steps, "only": sorted(only)}
            content[str(PurePosixPath(name, THINNED))] = json.dumps(record).encode()
        if path in content and (columns := to_columns(content[path])) is not None:
            content[str(PurePosixPath(name, COLUMNS_NAME))] = columns
            del content[path]
    packed, runs = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=runs, mode="w") as tar:
        for name in sorted(content, key=lambda name: (PurePosixPath(name).name, name)):
            member = tarfile.TarInfo(name)
            member.size = len(content[name])
            tar.addfile(member, io.BytesIO(content[name]))
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(zipfile.ZipInfo(TAR, _DATE), runs.getvalue(), zipfile.ZIP_LZMA)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, packed.getvalue())


def _without_paths(content: bytes, *keys: str) -> bytes:
    """Make the paths in one value of a JSON file relative, and return the file. If it has no value at these keys,
    return it unchanged."""
    try:
        record = json.loads(content)
        inner = record[keys[0]]
        relative = without_roots(inner[keys[1]])
    except (ValueError, LookupError, TypeError):
        return content  # a damaged record is packed as it is
    if relative == inner[keys[1]]:
        return content
    inner[keys[1]] = relative
    return json.dumps(record, indent=1, ensure_ascii=False).encode() + b"\n"


def _small(metrics: bytes, statistics: set[str], digits: int, steps: int) -> bytes:
    """Return a metrics file with only the series of these statistics, rounded, and with means of training losses over
    ``steps`` steps; the first loss stays, because it is the initial one. Lines that cannot be read are kept."""
    records = [with_floats(parse_line(line) or {}) for line in metrics.splitlines()]
    blocks: dict[str, dict[int, dict[int, float]]] = {}  # losses by name, block of steps (the first: -1) and step
    for record in records:
        for name, value in record.items():
            if name.partition("/")[0] in LOSSES:
                step, of_name = record["step"], blocks.setdefault(name, {-1: {record["step"]: value}})
                block = of_name[-1] if step in of_name[-1] else of_name.setdefault((step - 1) // steps, {})
                block[step] = value  # if a step was written twice, the later value counts
    means = {
        (name, max(block)): round(sum(block.values()) / len(block), LOSS_DECIMALS)
        for name, of_name in blocks.items()
        for block in of_name.values()
    }
    lines = []
    for record, line in zip(records, metrics.splitlines(keepends=True), strict=True):
        values: dict[str, Any] = {}
        for name, value in record.items():
            statistic = name.partition("/")[0]
            if name != "step" and statistic not in statistics and not name.startswith("val_"):
                continue
            if statistic not in LOSSES:
                values[name] = float(f"{value:.{digits}g}") if isinstance(value, float) else value
            elif (name, record["step"]) in means:
                values[name] = means[name, record["step"]]
        if len(values) > 1 or not record:
            lines.append(json_line(values) if record else line)
    return b"".join(lines)


def unpacked(path: Path) -> Path:
    """Unpack a pack, also a shipped one, into a folder that exists until this process ends; return the folder. A path
    that is not a file is returned unchanged.

    Raises:
        UserError: the file is not a pack, or is damaged.
    """
    path = find_file(path)
    if not path.is_file():
        return path
    parent = Path(tempfile.mkdtemp(prefix="mmqk-pack-"))
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    folder = parent / (path.stem.strip(".") or "pack")
    try:
        with zipfile.ZipFile(path) as archive:
            runs = io.BytesIO(archive.read(TAR))
        with tarfile.open(fileobj=runs, mode="r:") as tar:
            tar.extractall(folder, filter="data")  # refuses links and paths outside the folder
        for columns in list(folder.rglob(COLUMNS_NAME)):
            columns.with_name(METRICS_NAME).write_bytes(from_columns(columns.read_bytes()))
            columns.unlink()
    except (
        zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, ValueError, LookupError,
        TypeError, AttributeError, RuntimeError, OSError,
    ) as error:  # fmt: skip
        advice = "give a file that mmqk pack has written"
        raise UserError(f"{path} cannot be read as a pack ({reason_of(error)}): {advice}") from error
    return folder


def to_columns(metrics: bytes) -> bytes | None:
    """Return the columns of a metrics file.

    Returns None if `from_columns` would not restore the file byte for byte, for example because a line is unreadable.
    """
    shapes: dict[tuple[str, ...], int] = {}
    lines: list[int] = []
    values: dict[str, list[Any]] = {}
    for line in metrics.splitlines():
        if (record := parse_line(line)) is None:
            return None
        lines.append(shapes.setdefault(tuple(record), len(shapes)))
        for name, value in record.items():
            values.setdefault(name, []).append(value)
    columns = _compact({"shapes": list(shapes), "lines": lines, "values": values})
    return columns if from_columns(columns) == metrics else None


def from_columns(columns: bytes) -> bytes:
    """Return the metrics file of these columns."""
    content = json.loads(columns)
    shapes, values = content["shapes"], {name: iter(v) for name, v in content["values"].items()}
    lines = ({name: next(values[name]) for name in shapes[shape]} for shape in content["lines"])
    return b"".join([_compact(line) + b"\n" for line in lines])


def _compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
