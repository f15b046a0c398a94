"""Processes that read epochs: each begins with states from the disk, and writes keys and states to the disk."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import re
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.readers import READERS, Setup

PATIENCE = 180  # time limit of a process, in seconds
PRELOAD = ["benchmarks.streams", "webdataset", "torchdata", "datasets", "megatron.energon", "streaming", "litdata"]


@dataclass(frozen=True)
class Task:
    """What one process does.

    Attributes:
        reader: name of the reader.
        setup: what it is built for.
        out: folder of the delivered keys and the saved states.
        states: files of the states of all ranks, to begin with.
        save: numbers of samples, of all ranks, after which the state is saved.
        epochs: epochs to read.
    """

    reader: str
    setup: Setup
    out: str
    states: tuple[str, ...] = ()
    save: tuple[int, ...] = ()
    epochs: int = 1


def deliver(task: Task) -> None:
    """Read epochs, and write the keys of each batch and the states.

    The first epoch may be empty: the rest of one that was complete when its state was saved.
    """
    setup = task.setup
    if setup.world > 1:
        torch.distributed.init_process_group("gloo")
    reader = READERS[task.reader][0](setup, [pickle.loads(Path(path).read_bytes()) for path in task.states])
    delivered = epochs = 0
    with open(Path(task.out) / f"keys-{setup.rank}.jsonl", "w") as file:
        for _ in range(task.epochs + 1):
            before = delivered
            for batch in reader.epoch():
                delivered += len(batch) * setup.world
                file.write(json.dumps([epochs, batch]) + "\n")
                if delivered in task.save:
                    path = Path(task.out) / f"state-{delivered}-{setup.rank}"
                    path.write_bytes(pickle.dumps(reader.state()))
            epochs += delivered > before
            if epochs == task.epochs:
                return


class Failure(Exception):
    """A process failed; the message is the last line of its output."""


@dataclass
class Delivery:
    """What the processes of a task delivered.

    Attributes:
        batches: batches by epoch, each joined over the ranks.
        output: standard output and error.
        out: folder of the states.
    """

    batches: list[list[list[str]]]
    output: str
    out: Path

    def keys(self, epoch: int = 0, until: int | None = None) -> list[str]:
        """Return the first keys of an epoch."""
        return [key for batch in self.batches[epoch] for key in batch][:until]

    def states(self, after: int) -> tuple[str, ...]:
        """Return the files of the states that were saved after this many samples, by rank.

        Raises:
            Failure: no batch ended after this many samples.
        """
        files = tuple(sorted(str(path) for path in self.out.glob(f"state-{after}-*")))
        if not files:
            raise Failure(f"no batch ended after {after} samples")
        return files


def run(task: Task, world: int = 1) -> Delivery:
    """Run a task in new processes, one for each rank.

    Raises:
        Failure: a process failed, or did not end in time.
    """
    out = Path(tempfile.mkdtemp(dir=task.out))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = [replace(task, out=str(out), setup=replace(task.setup, rank=rank, world=world)) for rank in range(world)]
    environments = [
        {
            "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "HF_HUB_OFFLINE": "1",
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        }
        for rank in range(world)
    ]  # fmt: skip
    output = apart([(deliver, (task,), environment) for task, environment in zip(ranks, environments, strict=True)])
    return Delivery(_joined(out, world, task.epochs), output, out)


def apart(jobs: Sequence[tuple[Callable[..., None], tuple[Any, ...], dict[str, str]]]) -> str:
    """Call functions at the same time, each in a new process with its arguments and environment, and return what they
    printed. The processes are forked from one that has imported the libraries and has done nothing else.

    Raises:
        Failure: a process failed, or did not end in time.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(i) for i in range(len(jobs))]
        processes = [server.Process(target=_logged, args=(str(log), *job)) for log, job in zip(logs, jobs, strict=True)]
        for process in processes:
            process.start()
        late = ""
        for process in processes:
            process.join(PATIENCE)
            if process.is_alive():
                process.kill()
                late = f"\nno end within {PATIENCE} s"
        output = "".join(log.read_text() for log in logs if log.exists()) + late
    if late or any(process.exitcode for process in processes):
        raise Failure(output)
    return output


def _logged(log: str, function: Callable[..., None], arguments: tuple[Any, ...], environment: dict[str, str]) -> None:
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)  # of loader workers, as in an ordinary process
    function(*arguments)


def _joined(out: Path, world: int, epochs: int) -> list[list[list[str]]]:
    batches: list[list[list[str]]] = [[] for _ in range(epochs)]
    ranks = [(out / f"keys-{rank}.jsonl").read_text().splitlines() for rank in range(world)]
    for lines in zip(*ranks, strict=True):
        parts = [json.loads(line) for line in lines]
        batches[parts[0][0]].append([key for _, part in parts for key in part])
    return batches


def last_line(output: str) -> str:
    """Return the last line of an output that names an error, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failure)\b|no end within", line)]
    return (named or lines or ["no output"])[-1][:160]
