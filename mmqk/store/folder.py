"""The run folder: its lock, the identity of its run, and the status of that run.

run.json        identity, its hash, the code's version, details (versions, command, resolved config)
status.json     status, step, reason, seconds
metrics.jsonl   one line per step (`mmqk.store.metrics`)
config.yaml     the resolved configuration, for readers
checkpoints/    the checkpoints; TensorBoard's event files are beside this folder
run.lock        locked while a process trains in the folder
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from mmqk.store.errors import UserError
from mmqk.store.files import DamagedFile, is_temporary, naming, read_json, write_json, writing
from mmqk.store.formatting import ROOT
from mmqk.store.metrics import METRICS_NAME

if TYPE_CHECKING:
    from filelock import FileLock

RUN_NAME, STATUS_NAME, LOG_NAME, LOCK_NAME = "run.json", "status.json", "train.log", "run.lock"
ABLATION_NAME = "ablation.json"
EXIT_CODES = {"completed": 0, "failed": 1, "diverged": 3, "interrupted": 130}
STATUSES = ("running", *EXIT_CODES)
FINISHED = ("completed", "diverged")

# Files that may exist if a run was killed before it wrote run.json; mmqk ablate or the user's shell writes train.log.
_BEFORE_RUN_JSON = {LOCK_NAME, STATUS_NAME, LOG_NAME}
_FIELDS_NAMED = 5
# `is_locked` takes the lock for an instant, which must not make a run fail.
_WAIT_SECONDS = 0.2


def canonical(obj: Any) -> str:
    """Return JSON with sorted keys and no spaces, so that equal values give equal text; tuples become lists.

    Raises:
        ValueError: a float is not finite.
        TypeError: a value is not plain data.
    """
    return json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def identity_hash(record: Mapping[str, Any]) -> str:
    """Return the first 10 hex digits of the sha256 of the canonical record."""
    return hashlib.sha256(canonical(record).encode()).hexdigest()[:10]


def differing_fields(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return the sorted dotted names of the fields in which two records differ, including fields that only one record
    has."""
    # Canonical texts are compared: the values 1, 1.0 and True count as different, as they do in the hash.
    flat_a, flat_b = ({n: canonical(v) for n, v in flatten(json.loads(canonical(r))).items()} for r in (a, b))
    return sorted(name for name in flat_a.keys() | flat_b.keys() if flat_a.get(name) != flat_b.get(name))


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping with dotted names as keys. An empty mapping counts as a value."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def hash_fraction(content: bytes) -> float:
    """Return a number in [0, 1) that depends only on the content. It decides which samples are held out."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / 2**64


@cache
def code_version() -> str:
    """Return the commit at the first call, such as ``5a52617b21``; ``-dirty`` follows if files differ from it."""
    from importlib.metadata import version  # slow to import

    if not (ROOT / ".git").exists():
        return version("mmqk")
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return f"{version('mmqk')} (git cannot read {ROOT})"


def lock_folder(folder: Path) -> FileLock:
    """Lock a run folder; ``release()`` unlocks it.

    Raises:
        UserError: this or another process holds the lock, or the file system has no locks.
        OSError: the lock file cannot be written.
    """
    from filelock import FileLock, Timeout  # slow to import

    lock = FileLock(folder / LOCK_NAME, timeout=_WAIT_SECONDS, thread_local=False)
    try:
        lock.acquire(poll_interval=0.02)
    except Timeout:
        raise UserError(f"a process is already training in {folder}: wait for it or give another --out") from None
    except NotImplementedError as error:
        raise UserError(f"{folder} cannot be locked ({error}): put --out on a file system with locks") from error
    return lock


def is_locked(folder: Path) -> bool:
    """Return whether a living process trains in ``folder`` (False for a folder without a lock file)."""
    if not (folder / LOCK_NAME).exists():
        return False
    from filelock import FileLock, Timeout  # slow to import

    try:
        with FileLock(folder / LOCK_NAME, timeout=0):
            return False
    except (Timeout, PermissionError):
        return True


@dataclass(frozen=True)
class Status:
    """Status of a run.

    Attributes:
        status: running, completed, diverged, interrupted or failed.
        step: optimizer steps done when the status was written.
        reason: one sentence, or empty.
        seconds: wall-clock seconds of training, over all resumes. They begin when the data are prepared.
    """

    status: str
    step: int = 0
    reason: str = ""
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether the run is completed or diverged; the same command does not continue such a run."""
        return self.status in FINISHED


def read_status(folder: Path) -> Status | None:
    """Return the status of a run folder, or None if it has none.

    Raises:
        DamagedFile: status.json exists but cannot be read.
    """
    path, advice = folder / STATUS_NAME, "remove it, and the run resumes from its newest checkpoint"
    record = read_json(path, advice)
    if record is None:
        return None
    if record.get("status") not in STATUSES:
        raise DamagedFile(path, f"it is not the status of a run: {record!r:.60}", advice)
    return Status(**{name: record[name] for name in asdict(Status("")) if name in record})


def read_run(folder: Path) -> dict[str, Any] | None:
    """Return the record in ``run.json`` of a run folder, or None if there is none.

    Raises:
        DamagedFile: run.json exists but cannot be read.
    """
    return read_json(folder / RUN_NAME, "restore it from a copy, or give another --out")


def read_details(folder: Path) -> dict[str, Any]:
    """Return the details of the record of a run folder: versions, command, configuration, and the parent of a fork;
    empty if there is no record."""
    return (read_run(folder) or {}).get("details", {})


class NoRun(UserError):
    """A folder does not exist or has no run."""


def read_ablation(folder: Path) -> dict[str, Any] | None:
    """Return the content of ``ablation.json``, the record of a grid beside its runs: the grid, the registration of
    its claims, and its runs; None if the folder has none.

    Raises:
        DamagedFile: the file cannot be read, has no grid or no runs, or lists a run outside ``folder``.
    """
    path, advice = folder / ABLATION_NAME, "restore it from a copy, as it holds the registration of the claims"
    record = read_json(path, advice)
    if record is None:
        return None
    if missing := {"grid", "runs"} - record.keys():
        raise DamagedFile(path, f"it has no {min(missing)}", advice)
    for run in record["runs"]:
        name = PurePosixPath(run["folder"])
        if name.is_absolute() or ".." in name.parts:
            raise DamagedFile(path, f"it lists the run {name}, which is not beside it", advice)
    return record


def find_runs(folder: Path) -> list[Path]:
    """Return, sorted, the run folders up to three levels below ``folder``, including ``folder`` itself. A run folder
    has a run.json or a metrics.jsonl.

    Raises:
        NoRun: the folder does not exist or has no run.
        UserError: the path is not a folder.
    """
    if not folder.is_dir():
        kind = UserError if folder.exists() else NoRun
        raise kind(f"{folder} is not a folder: give one that mmqk train or mmqk ablate has written")
    folders = [folder, *(path for pattern in ("*", "*/*", "*/*/*") for path in folder.glob(pattern))]
    runs = [path for path in folders if any((path / name).exists() for name in (RUN_NAME, METRICS_NAME))]
    if not runs:
        raise NoRun(f"{folder} has no run (no run.json or metrics.jsonl): give a folder with runs")
    return sorted(runs)


class RunFolder:
    """A run folder that this process has locked: `open` locks it, `close` (or a with statement) unlocks it.

    Attributes:
        path: the folder.
        id: hash of the identity.
        state: "new"; "resume" if the run was interrupted, failed or killed; "finished" if completed or diverged.
    """

    def __init__(self, path: Path, lock: FileLock, record: Mapping[str, Any], new: bool):
        self.path = path
        self._lock = lock
        self.record = dict(record)
        self.id: str = record["id"]
        before = read_status(path) or Status("running")
        self.state: Literal["new", "resume", "finished"] = "new" if new else "finished" if before.finished else "resume"
        self._seconds_before = before.seconds
        self._began: float | None = None

    @classmethod
    def open(cls, path: str | Path, identity: Mapping[str, Any], details: Mapping[str, Any]) -> RunFolder:
        """Lock the folder for the run with this identity. After an error, the folder is unchanged.

        Args:
            path: created if it does not exist.
            identity: the fields that identify the run, as plain data.
            details: stored with the identity of a new run: versions, command, resolved configuration.

        Raises:
            UserError: another process trains in the folder, the folder has another run or other files, or it cannot
                be read or written.
        """
        path = Path(path)
        _check(path, identity)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            lock = lock_folder(path)
            try:
                # Check again under the lock: another process may have written before this process took the lock.
                record = _check(path, identity)
                code, new = code_version(), record is None
                if record is None:
                    record = {"id": identity_hash(identity), "code": code}
                    record |= {"identity": dict(identity), "details": dict(details)}
                    (path / STATUS_NAME).unlink(missing_ok=True)
                    write_json(path / RUN_NAME, record)
                elif code not in record["code"].split("+") and not (read_status(path) or Status("")).finished:
                    # Another version of the code trained the first part of this run, so no version can reproduce the
                    # whole run.
                    record["code"] = f"{record['code']}+{code}"
                    write_json(path / RUN_NAME, record)
                for leftover in filter(is_temporary, path.iterdir()):
                    leftover.unlink(missing_ok=True)
                return cls(path, lock, record, new)
            except BaseException:
                lock.release()
                raise

    @property
    def metrics_path(self) -> Path:
        """``metrics.jsonl``."""
        return self.path / METRICS_NAME

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints; the first checkpoint creates it."""
        return self.path / "checkpoints"

    def status(self) -> Status:
        """Return the run's status; "running" at step 0 if none was written yet."""
        return read_status(self.path) or Status("running")

    def begin_training(self) -> None:
        """Start to count the seconds of training. Before this call, the status has the seconds before the resume."""
        self._began = time.monotonic()

    def set_status(self, status: str, step: int, reason: str = "") -> None:
        """Write ``status.json`` atomically, with the seconds trained so far."""
        trained = 0.0 if self._began is None else time.monotonic() - self._began
        now = Status(status, int(step), reason, round(self._seconds_before + trained, 3))
        path = self.path / STATUS_NAME
        try:
            write_json(path, asdict(now))
        except OSError:
            if status == "running":
                raise
            # On a full disk the old status can still be overwritten in place.
            with naming(path), open(path, "r+b", buffering=0) as file:
                file.write(json.dumps(asdict(now)).encode())
                file.truncate()

    def close(self) -> None:
        """Unlock the folder; a second call does nothing."""
        self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def mark_ended(path: Path, status: str, step: int, reason: str, before: Status | None = None) -> bool:
    """Write the status of a run whose process died without writing a final status; return False if nothing is
    written.

    Nothing is written if the process stored a final status, if a living process has locked the folder, or if
    status.json cannot be read. ``before`` is the status before the process started. If the stored status
    equals ``before``, the process did not write it, so it is replaced unless the run is finished.
    """
    try:
        lock = lock_folder(path)
    except UserError:
        return False
    try:
        stored = read_status(path) or Status("running")
        if stored.status != "running" and (stored != before or stored.finished):
            return False
        write_json(path / STATUS_NAME, asdict(Status(status, step, reason, stored.seconds)))
        return True
    except DamagedFile:
        return False
    finally:
        lock.release()


def _check(path: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the record of the run with this identity in ``path``, or None if a new run may start there."""
    with writing(path):
        try:
            names = {p.name for p in path.iterdir() if not is_temporary(p)}
        except FileNotFoundError:
            return None
    if RUN_NAME not in names:
        others = sorted(names - _BEFORE_RUN_JSON)
        if others:
            raise UserError(f"{path} is not a run folder and has other files ({others[0]}): give another --out")
        return None
    record = read_run(path) or {}
    for key in ("id", "code", "identity"):
        if key not in record:
            raise DamagedFile(path / RUN_NAME, f"it has no {key}", "give another --out or remove the folder")
    read_status(path)
    fields = differing_fields(record["identity"], identity)
    if fields:
        stored, requested = flatten(record["identity"]), flatten(identity)
        named = [
            f"{name} ({_short(stored, name)} in the folder, {_short(requested, name)} now)"
            for name in fields[:_FIELDS_NAMED]
        ]
        more = f" and {len(fields) - _FIELDS_NAMED} more" if len(fields) > _FIELDS_NAMED else ""
        raise UserError(f"{path} has another run, which differs in {', '.join(named)}{more}: give another --out")
    return record


def _short(flat: Mapping[str, Any], name: str) -> str:
    text = repr(flat[name]) if name in flat else "absent"
    return text if len(text) <= 40 else text[:37] + "..."
