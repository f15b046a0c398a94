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

from mmqk.store.errors import UserError
from mmqk.store.files import read_regular, write_atomic
from mmqk.store.folder import find_runs
from mmqk.store.formatting import without_roots
from mmqk.store.metrics import METRICS_NAME, parse_line
from mmqk.store.shipped import find_file

TAR = "runs.tar"
ABLATION = "ablation.json"
THINNED = "thinned.json"
COLUMNS_NAME = "metrics.columns.json"
FILES = ("run.json", "status.json", METRICS_NAME, "alarms.jsonl", "config.yaml", "data.json", "fork.json",
         "skipped.json", THINNED)  # fmt: skip
REQUIRED = ("run.json", "status.json", METRICS_NAME)  # each run of a grid has these files
# A report reads these statistics and those that start with val_.
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
_DATE = (1980, 1, 1, 0, 0, 0)
_LARGEST = 2**31  # bytes of all files of an unpacked pack


def write_pack(
    folder: Path, out: Path, small: bool = False, only: Iterable[str] = REPORTED, digits: int = FEW_DIGITS
) -> None:
    """Write a pack of all runs under ``folder``.

    Args:
        small: pack only some statistics, with few digits; losses of training steps with 3 decimals.
        only: the statistics of a small pack, besides those of the validation.
        digits: significant digits of a small pack.

    Raises:
        UserError: the folder has no runs.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give one that mmqk train or mmqk ablate has written")
    content: dict[str, bytes] = {}
    if (folder / ABLATION).exists():
        content[ABLATION] = _without_paths(read_regular(folder / ABLATION), "grid", "base")
    for run in find_runs(folder):
        name = run.relative_to(folder).as_posix()
        for file in FILES:
            if (run / file).exists():
                content[str(PurePosixPath(name, file))] = read_regular(run / file)
        if (stored := str(PurePosixPath(name, "run.json"))) in content:
            content[stored] = _without_paths(content[stored], "details", "command")
        path = str(PurePosixPath(name, METRICS_NAME))
        if small and path in content and not (run / THINNED).exists():
            content[path], record = _small(content[path], set(only), digits)
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


def _small(metrics: bytes, statistics: set[str], digits: int) -> tuple[bytes, dict[str, Any]]:
    """Return a metrics file with only the series of these statistics, rounded, and a record of these changes."""
    lines = []
    for line in metrics.splitlines(keepends=True):
        if record := parse_line(line):
            values = {
                name: _rounded(name, value, digits) if isinstance(value, float) else value
                for name, value in record.items()
                if name == "step" or name.partition("/")[0] in statistics or name.startswith("val_")
            }
            line = json.dumps(values, separators=(",", ":")).encode() + b"\n"
        lines.append(line)
    return b"".join(lines), {"digits": digits, "loss_decimals": LOSS_DECIMALS, "only": sorted(statistics)}


def _rounded(name: str, value: float, digits: int) -> float:
    of_step = name.partition("/")[0] in ("loss", "excess")
    return round(value, LOSS_DECIMALS) if of_step else float(f"{value:.{digits}g}")


def damaged_files(folder: Path, is_grid: bool) -> list[str]:
    """Return the files of the runs in a folder that cannot be read, and those that each run of a grid has but that
    are missing."""
    import yaml  # only a command that writes packs needs it

    names = []
    for path in (run / file for run in find_runs(folder) for file in FILES):
        if not path.exists():
            if is_grid and path.name in REQUIRED:
                names.append(f"{path.relative_to(folder).as_posix()} (missing)")
            continue
        try:
            text = read_regular(path).decode()
            for part in text.splitlines() if path.suffix == ".jsonl" else [text]:
                yaml.safe_load(part) if path.suffix == ".yaml" else json.loads(part)
        except (ValueError, RecursionError, yaml.YAMLError):
            names.append(path.relative_to(folder).as_posix())
    return names


def unpacked(path: Path) -> Path:
    """Unpack a pack, also a shipped one, into a folder that exists until this process ends; return the folder. A path
    that is not a file is returned unchanged.

    Raises:
        UserError: the file is not a pack, or is damaged.
    """
    path = find_file(path)
    if not path.is_file():
        return path
    files = _read(path)
    parent = Path(tempfile.mkdtemp(prefix="mmqk-pack-"))
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    folder = parent / (path.stem.strip(".") or "pack")
    for name, data in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def _read(path: Path) -> Iterable[tuple[str, bytes]]:
    advice = "give a file that mmqk pack has written"
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.namelist() != [TAR]:
                raise ValueError(f"{TAR} is not its only file")
            if archive.getinfo(TAR).file_size > _LARGEST:
                raise UserError(f"{path} has more than 2 GiB: {advice}")
            runs = io.BytesIO(archive.read(TAR))
        files, left = [], _LARGEST
        with tarfile.open(fileobj=runs, mode="r:") as tar:
            for member in tar:
                place = PurePosixPath(member.name)
                inside = not place.is_absolute() and ".." not in place.parts and "\\" not in member.name
                known = place.name in (*FILES, COLUMNS_NAME) or member.name == ABLATION
                if not (inside and known and member.isreg() and not member.issparse()):
                    raise UserError(f"{path} has the file {member.name!r:.80}, which no pack has: {advice}")
                content = tar.extractfile(member)
                assert content is not None  # the member is a regular file
                data = content.read()
                if place.name == COLUMNS_NAME:
                    place, data = place.with_name(METRICS_NAME), from_columns(data, left)
                    left -= len(data)
                files.append((str(place), data))
        return files
    except (
        zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, ValueError, RuntimeError, OSError
    ) as error:  # fmt: skip
        raise UserError(
            f"{path} cannot be read as a pack ({' '.join(str(error).split())}): {advice}"
        ) from error


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
    return columns if from_columns(columns, len(metrics)) == metrics else None


def from_columns(columns: bytes, most_bytes: int) -> bytes:
    """Return the metrics file of these columns.

    Raises:
        ValueError: these are no columns, or the metrics file would have more than ``most_bytes`` bytes.
    """
    try:
        content = json.loads(columns)
        shapes, values = content["shapes"], {name: iter(v) for name, v in content["values"].items()}
        lines, size = [], 0
        for shape in content["lines"]:
            lines.append(_compact({name: next(values[name]) for name in shapes[shape]}) + b"\n")
            size += len(lines[-1])
            if size > most_bytes:
                raise ValueError(f"the metrics of a run have more than {most_bytes:,} bytes")
    except (LookupError, TypeError, AttributeError, StopIteration, RecursionError) as error:
        raise ValueError("the columns of a metrics file are damaged") from error
    return b"".join(lines)


def _compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
