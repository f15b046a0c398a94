"""Simulate a file system with faults: operations fail, writes are short, a crash loses what is not synced.

There are three scenarios: a run, the record of a grid, and a report. The first cases plant each single fault of each
scenario, in order. The remaining cases plant two faults, the second one in the next call of the command. Each case
then calls the command once more without a fault. The result must equal that of a command that never had a fault.

After a crash, a file has the content of its last fsync, any part of what was written later, or zeros in its place.
Each name that was created, replaced or removed since the last fsync of its folder is in the old or in the new state,
independently of the other names.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmqk import ablate, report
from mmqk.lab.page.drawing import Drawing
from mmqk.store import cli_main, read_status
from mmqk.train import main as train_main
from tests.faulty_disk import Disk
from tests.soak import kills
from tests.soak.kills import BASE, DIAL, age_events, compare

CASES, QUICK, SECONDS = 2026, 24, 120.0
# Largest number of faults at one site. They are spread evenly over its calls, because a checkpoint has 1,800 writes.
MOST = 12
KINDS = ("full disk", "input/output error", "stays full", "short write", "crash")


Inode = tuple[int, int]


class Lying(Disk):
    """A disk with one fault of ``kind``. A crash writes a state that a power failure can leave in ``root``, and kills
    the process."""

    def __init__(self, root: Path, kind: str, site: tuple[str, str], nth: int, rng: random.Random):
        code = errno.EIO if kind == "input/output error" else errno.ENOSPC
        super().__init__(root, site, nth, code, stays_full=kind == "stays full")
        self.kind, self.rng, self.short = kind, rng, False
        # How often each inode was removed, because the system reuses inode numbers.
        self.removed: Counter[int] = Counter()
        self.synced: dict[Inode, bytes] = {}
        self.names: dict[str, dict[str, Inode]] = {}  # by folder
        for folder, _, files in os.walk(root):  # the files of earlier calls are on the disk
            self._sync_names(folder)
            for name in files:
                self._sync_content(os.path.join(folder, name))

    def strike(self, operation: str, path: str) -> None:
        if self.kind == "crash":
            self._crash()
        if self.kind == "short write" and operation == "write" and not self.short:
            self.short = True
            return
        super().strike(operation, path)

    def write(self, file: Any, data: Any) -> Any:
        if not self.short:
            return file.write(data)
        self.short = False
        file.write(data[: len(data) // 2])
        file.flush()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _of_descriptor(self, name: str, call: Any) -> Any:
        fake = super()._of_descriptor(name, call)
        if name != "fsync":
            return fake

        def fsync(descriptor: int) -> None:
            fake(descriptor)
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if path.startswith(self.root):
                (self._sync_names if os.path.isdir(path) else self._sync_content)(path)

        return fsync

    def _of_path(self, name: str, call: Any) -> Any:
        fake = super()._of_path(name, call)
        if name not in ("replace", "rename", "unlink"):
            return fake

        def remove(path: Any, *rest: Any, **more: Any) -> Any:
            try:
                inode = os.stat(rest[0] if rest else path, dir_fd=more.get("dir_fd")).st_ino
            except OSError:
                inode = None
            result = fake(path, *rest, **more)
            if inode is not None:
                self.removed[inode] += 1
            return result

        return remove

    def _inodes(self, folder: str) -> dict[str, Inode]:
        return {entry.name: (entry.inode(), self.removed[entry.inode()]) for entry in SCANDIR(folder)}

    def _sync_names(self, folder: str) -> None:
        self.names[folder] = self._inodes(folder)

    def _sync_content(self, path: str) -> None:
        inode = os.stat(path).st_ino
        self.synced[inode, self.removed[inode]] = _read(path)

    def _crash(self) -> None:
        """Write a state that the crash can leave, and kill the process. The state goes to a folder next to ``root``,
        because other threads still write to ``root``."""
        with contextlib.suppress(BaseException):
            state = self._after_crash(self.root) if os.path.isdir(self.root) else {}
            for path, content in state.items():
                path = path.replace(self.root, f"{self.root}{AFTER}", 1)
                os.makedirs(path if content is None else os.path.dirname(path), exist_ok=True)
                if content is not None:
                    with os.fdopen(OPEN(path, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
                        file.write(content)
        os.kill(os.getpid(), signal.SIGKILL)

    def _after_crash(self, folder: str) -> dict[str, bytes | None]:
        now = self._inodes(folder)
        before = self.names.get(folder, {})
        state: dict[str, bytes | None] = {folder: None}
        for name in sorted({*now, *before}):
            inode = now.get(name) if self.rng.random() < 0.5 else before.get(name)
            path = os.path.join(folder, name)
            if inode is None:
                continue
            if os.path.isdir(path):
                state |= self._after_crash(path)
            elif inode == now.get(name):
                state[path] = self._content(self.synced.get(inode, b""), _read(path))
            elif inode in self.synced:
                state[path] = self.synced[inode]
        return state

    def _content(self, synced: bytes, written: bytes) -> bytes:
        if synced == written:
            return synced
        if not written.startswith(synced):
            return self.rng.choice((synced, written, written[: self.rng.randrange(len(written) + 1)]))
        tail = written[len(synced) :]
        part = tail[: self.rng.randrange(len(tail) + 1)]
        return synced + self.rng.choice((b"", tail, part, bytes(len(part))))


def _read(path: str) -> bytes:
    descriptor = OPEN(path, os.O_RDONLY)
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


SCANDIR, OPEN = os.scandir, os.open  # the original functions; a mounted disk replaces those of `os`
AFTER = ".after-crash"


def commands(shared: Path) -> dict[str, Callable[[Path], Any]]:
    """Return the function of each scenario; its argument is the folder that it writes."""
    grid = ["--config", str(shared / "grid.yaml"), "--jobs=1"]
    return {
        "run": lambda out: cli_main(train_main)([*BASE, *DIAL, f"--out={out}"]),
        "grid": lambda out: cli_main(ablate.main)([*grid, f"--out={out}"]),
        "report": lambda out: cli_main(report.main)([str(shared / "grid"), f"--out={out}"]),
    }


def prepare(shared: Path) -> None:
    """Write a finished grid, the result of each scenario without faults, and the list of all single faults."""
    leave_figures_out()
    kills.grid(shared, shared / "grid").communicate()
    (shared / "run.begin").mkdir()
    (shared / "report.begin").mkdir()
    shutil.copytree(shared / "grid", shared / "grid.begin")
    record = json.loads((shared / "grid.begin/ablation.json").read_text())
    (shared / "grid.begin/ablation.json").write_text(json.dumps(record, indent=2))  # older whitespace
    faults = []
    for scenario, command in commands(shared).items():
        out = begin(scenario, shared, shared / f"{scenario}.whole")
        seen = shared / "seen.json"
        assert in_child(lambda out=out, command=command, seen=seen: recorded(out, command, seen)) == 0  # type: ignore[misc]
        for operation, name, last in json.loads(seen.read_text()):
            for nth in sorted({round(i * last / (MOST - 1)) for i in range(MOST)}):
                faults += [(scenario, kind, (operation, name), nth) for kind in KINDS if possible(kind, operation)]
    (shared / "faults.json").write_text(json.dumps(faults))


def possible(kind: str, operation: str) -> bool:
    reads = operation in ("open", "read", "readline", "readinto", "scandir", "listdir")
    if kind == "short write":
        return operation == "write"
    return not reads or kind == "input/output error"


def begin(scenario: str, shared: Path, out: Path) -> Path:
    shutil.copytree(shared / f"{scenario}.begin", out)
    return out


def recorded(out: Path, command: Callable[[Path], Any], seen: Path) -> int:
    with Disk(out).mounted() as disk:
        code = command(out)
    seen.write_text(json.dumps(sorted((*site, last) for site, last in disk.seen.items())))
    return int(code)


def in_child(call: Callable[[], Any]) -> int:
    """Call a function in a forked process, and return the exit code of the process."""
    return os.waitstatus_to_exitcode(os.waitpid(kills.forked(call), 0)[1])


def case(number: int, rng: random.Random, shared: Path, work: Path) -> str:
    ablate.start_server = lambda *_: None  # type: ignore[assignment]  # no run is left to train
    leave_figures_out()
    faults = json.loads((shared / "faults.json").read_text())
    single = number < len(faults)
    scenario, *first = faults[number] if single else rng.choice(faults)
    chain = [first] if single else [first, rng.choice([fault[1:] for fault in faults if fault[0] == scenario])]
    command, out = commands(shared)[scenario], begin(scenario, shared, work / "out")
    log = Path(f"{work}.log")
    for kind, site, nth in chain:
        told, before = log.stat().st_size, status_of(out)
        code = in_child(lambda kind=kind, site=site, nth=nth: faulty(out, command, kind, (site[0], site[1]), nth, rng))  # type: ignore[misc]
        if code == -signal.SIGKILL:
            shutil.rmtree(out, ignore_errors=True)
            if (after := out.with_name(out.name + AFTER)).exists():
                after.rename(out)
        judge(code, kind, log.read_bytes()[told:].decode(), scenario, out, before)
        age_events(out)
    code = in_child(lambda: command(out))
    assert code == 0, f"after {chain} the next call ends with {code}"
    if scenario == "run":
        compare(shared / "run.whole", out, tensorboard="crash" not in [kind for kind, *_ in chain])
    else:
        whole = shared / f"{scenario}.whole"
        different = [name for name in content(whole) if content(out).get(name) != content(whole)[name]]
        assert not different, f"after {chain} {different} differ"
    return f"{scenario}, {' then '.join(kind for kind, *_ in chain)}" if single else f"{scenario}, a pair"


def faulty(out: Path, command: Callable[[Path], Any], kind: str, site: tuple[str, str], nth: int,
           rng: random.Random) -> int:  # fmt: skip
    with Lying(out, kind, site, nth, rng).mounted():
        return int(command(out))


def status_of(out: Path) -> bytes | None:
    """Return the content of status.json, empty if there is none; None for a folder without a run."""
    if not (out / "run.json").exists():
        return None
    return (out / "status.json").read_bytes() if (out / "status.json").exists() else b""


def judge(
    code: int, kind: str, told: str, scenario: str, out: Path, before: bytes | None, steps: int = kills.STEPS
) -> None:
    """Check that a command survives a fault, or ends with one sentence and a correct status. The content of
    status.json was ``before``."""
    if code == -signal.SIGKILL and kind == "crash":
        return
    assert "Traceback" not in told, told
    if code == 0:
        return
    assert code in (1, 2), f"exit code {code}: {told}"
    sentences = [line for line in told.splitlines() if line.startswith("mmqk: ")]
    assert len(sentences) == 1 and "cannot be" in sentences[0], told
    if scenario == "run" and kind != "stays full" and (out / "metrics.jsonl").exists():
        status = read_status(out)
        # A run that cannot read a file after its last step has completed. A call that cannot read the files of an
        # earlier call does not begin, and leaves the status of the earlier call.
        completed = status is not None and (status.status, status.step) == ("completed", steps)
        untouched = before is not None and status_of(out) == before
        assert completed or untouched or (status is not None and status.status == "failed"), status


def content(folder: Path) -> dict[str, bytes]:
    """Return the content of all files that a command wrote, without those of finished runs."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths if "seed1" not in path.parts}


def leave_figures_out() -> None:
    """Leave figures out of reports, because they take most of the time."""
    Drawing.png = lambda drawing: b""  # type: ignore[method-assign]
