"""Train one run: one configuration in, one folder out. ``mmqk train --help``."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from types import FrameType
from typing import TYPE_CHECKING, Any

from mmqk import store
from mmqk.store import DamagedFile, RunFolder
from mmqk.store.checkpoint_files import checkpoints_in, step_of
from mmqk.store.errors import USER_ERROR_EXIT
from mmqk.store.formatting import inspect_command
from mmqk.store.metrics import METRICS_NAME

if TYPE_CHECKING:
    from mmqk.config import RunConfig
    from mmqk.data.datamodule import TokenDataModule
    from mmqk.training.ranks import Ranks

MOST_PADDING = 0.02
# A cluster sends SIGUSR1 some time before the time limit of the job (docs/cluster.md).
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def main(argv: list[str] | None = None) -> int:
    """Train or resume the run of ``argv``, unless it is finished; return the exit code of its status.

    Without arguments it prints the help.

    Raises:
        UserError: an error in the configuration, the data or the folder.
    """
    argv = sys.argv[1:] if argv is None else argv
    from mmqk.config import help_text, resolve

    if not argv:
        print(help_text())
        print("\nName a configuration, for example: mmqk train demo")
        return USER_ERROR_EXIT
    run = resolve(argv)
    from mmqk.training.device import advised
    from mmqk.training.ranks import Ranks
    from mmqk.training.saving import Interrupted

    _quieten()
    with Ranks(run, argv) as ranks:
        if ranks.first:
            return _first(run, argv, ranks)
        try:
            return _fit(run, None, ranks)
        except Interrupted:
            return store.EXIT_CODES["completed"]  # Lightning kills all processes if one returns another code
        except RuntimeError as error:
            raise advised(error) from error


def _first(run: RunConfig, argv: list[str], ranks: Ranks) -> int:
    """Run the process that writes to the run folder. A run on one device has only this process."""
    from mmqk.config import print_yaml
    from mmqk.config.run import note_parent
    from mmqk.training.device import advised, describe, resolve_device
    from mmqk.training.saving import Interrupted

    # A finished run needs no device.
    status = store.read_status(run.out)
    resolved = (
        None if status is not None and status.finished else resolve_device(run, ranks.trainer.strategy.root_device)
    )
    details = {"config": run.nested(), "command": ["python", "-m", "mmqk.train", *argv], **_environment()}
    if resolved is not None:
        details |= {"device": resolved, "parameters": _parameters(run)}
    if run.parent is not None:
        details["fork"] = note_parent(run)
    with RunFolder.open(run.out, run.identity, details) as folder:
        if folder.state == "finished":
            status = folder.status()
            print(f"{run.out} is {status.status} at step {status.step}: nothing to train.", flush=True)
            return 0
        if resolved is not None and not run.quiet:
            print(describe(resolved), flush=True)
        try:
            if not (config := folder.path / "config.yaml").exists():
                store.write_atomic(config, print_yaml(run))
            return _fit(run, folder, ranks)
        except (Interrupted, KeyboardInterrupt) as stop:
            return _interrupted(run, stop, folder)
        except Exception as error:
            ranks.end()
            said = advised(error)
            reason = store.disk_sentence(error) if isinstance(error, OSError) else " ".join(str(said).split())
            with contextlib.suppress(OSError):  # the disk error may persist
                if folder.status().status == "running":  # the error was outside Lightning's hooks
                    folder.set_status("failed", folder.status().step, reason[:300])
            raise said from error


def _parameters(run: RunConfig) -> int:
    """Return the number of trained parameters, if possible without allocating them."""
    import torch

    from mmqk.model import EarlyFusionTransformer

    with torch.device("cpu" if run.model.patch else "meta"):  # a patch may read weights
        return sum(p.numel() for p in EarlyFusionTransformer(run.model).parameters())


def _fit(run: RunConfig, folder: RunFolder | None, ranks: Ranks) -> int:
    """Train the run; ``folder`` is None in the processes that do not write to it."""
    from mmqk.checkpoint import load_checkpoint, weights_of
    from mmqk.data.datamodule import TokenDataModule
    from mmqk.training.device import set_threads, tune
    from mmqk.training.fork import START_NAME
    from mmqk.training.loggers import last_logged, open_integrations
    from mmqk.training.module import TrainingModule
    from mmqk.training.saving import last_checkpoint

    tune(ranks.trainer.strategy.root_device)
    set_threads(run.threads)
    data = TokenDataModule(run.data, run.seed)
    data.setup()
    resume_from, logged = None, -1
    if folder is not None:
        _fork(run, folder, data)
        logged = last_logged(run)  # read before a resume removes the steps that it will repeat
        resume_from = last_checkpoint(run, folder, _first_step(run))
        if resume_from is not None and step_of(resume_from) >= run.trainer.max_steps:
            # The run was killed after its last checkpoint, validation and probe, before it wrote its status.
            folder.set_status("completed", step_of(resume_from))
            return _ended(run, folder)
    has_steps_left, resume_from = ranks.start(resume_from)
    if not has_steps_left:
        return store.EXIT_CODES["completed"]
    set_threads(run.threads)  # Lightning has changed the number of threads
    module, trainer = TrainingModule.of(run), ranks.trainer
    if run.parent is not None and run.parent.is_import and resume_from is None:
        saved = load_checkpoint(run.out / START_NAME, "remove the run folder and fork again")
        module.model.load_state_dict(weights_of(saved))
    resumed_at = None if resume_from is None else step_of(resume_from)
    try:
        with noted_signals() as signals:
            _add_callbacks(trainer, module, run, folder, data, resumed_at, signals)
            if folder is not None:
                trainer.loggers = [*trainer.loggers, *open_integrations(run, logged)]
                folder.begin_training()
            trainer.fit(module, datamodule=data, ckpt_path=resume_from, weights_only=True)
    except SystemExit:  # Lightning raises it after a KeyboardInterrupt if a program calls `main`
        return store.EXIT_CODES["interrupted"]
    finally:
        if folder is not None:
            _skipped(folder, data)
    return store.EXIT_CODES["completed"] if folder is None else _ended(run, folder)


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Add the first signal to a list that the training loop reads after each step; a second signal has its usual
    effect and ends the run without a checkpoint.

    Only the main thread can receive signals; in another thread the list stays empty.
    """
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(signum: int, frame: FrameType | None) -> None:
        noted.append(signum)
        restore()

    def restore() -> None:
        for signum, handler in before.items():
            signal.signal(signum, handler)

    before = {signum: signal.signal(signum, note) for signum in SIGNALS}
    try:
        yield noted
    finally:
        restore()


def _add_callbacks(
    trainer: Any,
    module: Any,
    run: RunConfig,
    folder: RunFolder | None,
    data: TokenDataModule,
    resumed_at: int | None,
    signals: list[int],
) -> None:
    """Give Lightning's Trainer the callbacks and loggers of the run."""
    from mmqk.monitors.own.callback import RunMonitor
    from mmqk.training.callbacks import FLUSH_EVERY, Alarms, ProgressLine, StepLog, Validation
    from mmqk.training.loggers import RunLogger, StoryLogger
    from mmqk.training.saving import Checkpoints, Lifecycle

    steps, at_start = run.trainer.max_steps, {}
    if folder is not None:
        at_start = _at_start(run, data)
        store.write_json(folder.path / "data.json", data.statistics(steps * run.data.batch_size))
    every = (FLUSH_EVERY, run.monitor.every_n_steps, run.data.val_every_n_steps, run.checkpoint.every_n_steps)
    step_log = StepLog(every, at_start, _first_step(run), run.alarm.stop_diverged, run.monitor.at)
    checkpoints = Checkpoints(run.out / "checkpoints", run.checkpoint, step_log)
    heldout = data.probe_batch(run.monitor.probe_sequences) if run.monitor.probe_split == "heldout" else None
    monitor = RunMonitor(run.monitor, heldout, None if data.rows else data.step_rows)
    rules = store.AlarmRules(run.optim.warmup_steps, steps, module.trained_modalities)
    alarms = Alarms(run.out, run.alarm, rules, step_log, monitor, checkpoints)
    validation = Validation(data.val_batches, run.data.val_every_n_steps)
    # The order matters: the values of a step are logged before its checkpoint.
    trainer.callbacks += [
        step_log,
        monitor,
        validation,
        alarms,
        checkpoints,
        Lifecycle(folder, step_log, checkpoints, signals),
    ]
    if not run.quiet:
        trainer.callbacks.append(ProgressLine(step_log))
    trainer.loggers = [RunLogger(run.out / METRICS_NAME), alarms.collected]
    if "tensorboard" in run.logging:
        board = StoryLogger(run.out, run.model.modalities, run.monitor.tensorboard_layers, resumed_at)
        trainer.loggers = [*trainer.loggers, board]


def _ended(run: RunConfig, folder: RunFolder) -> int:
    """Print the status and the folder, and return the exit code. With --quiet this is the only line on stdout."""
    status = folder.status()
    if status.status == "diverged":
        _say(f"diverged at step {status.step}: {status.reason}")
    print(f"{status.status} at step {status.step} in {folder.path}", flush=True)
    if not run.quiet and (alarms := store.read_alarms(folder.path)):
        print(f"data of the first alarm: {inspect_command(folder.path, alarms[0].step)}", flush=True)
    if not run.quiet and "tensorboard" in run.logging:
        print(store.dashboards(folder.path), flush=True)
    return store.EXIT_CODES[status.status]


def _interrupted(run: RunConfig, stop: BaseException, folder: RunFolder) -> int:
    """Write the status, unless a callback has written it, and say from which step a resume continues."""
    saved = checkpoints_in(folder.checkpoints)
    step = step_of(saved[-1]) if saved else _first_step(run)
    with contextlib.suppress(OSError):
        if not folder.status().finished:
            folder.set_status("interrupted", step, str(stop) or "SIGINT received")
    _say(f"interrupted at step {step}; the same command continues from there.")
    if run.quiet:
        _ended(run, folder)
    return 128 + getattr(stop, "signum", signal.SIGINT)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _at_start(run: RunConfig, data: TokenDataModule) -> dict[str, float]:
    """Return the unigram losses and the share of captions that are cut, which are logged before step 1. Print
    warnings about the precision and the data."""
    if run.trainer.precision == "bf16-true":
        _say(
            "trainer.precision bf16-true is an experiment: a bf16 weight does not change if its update is below about"
            " 1/500 of it, so most weights stay as they are and weight decay does nothing (update_unchanged is their"
            " share). Set bf16-mixed to train all weights."
        )
    builder = data.builder
    if data.dial is not None:
        per_row = run.data.seq_len // data.dial.length if run.data.pack == "documents" else 1
        documents = run.trainer.max_steps * run.data.batch_size * per_row
        for sentence in data.dial.unlearnable(documents * data.dial.length):
            _say(sentence)
    if line := data.few_held_out():
        _say(line)
    for kind, padding in data.order.padding.items():
        if padding > MOST_PADDING:
            _say(
                f"{padding:.0%} of the tokens in packed sequences of kind {kind!r} are padding: raise data.seq_len to"
                " pack more documents into each."
            )
    floors = {f"val_unigram/{modality}": nats for modality, nats in data.unigram_loss().items()}
    cut, room = builder.captions_cut, builder.caption_room
    if cut is None:
        _say(f"Captions of more than {room} tokens are cut: raise data.seq_len to keep longer ones whole.")
        return floors
    if cut:
        share = f"{cut:.1%} of the captions are longer than {room} tokens and are cut"
        _say(f"{share}: raise data.seq_len to keep them whole.")
    return {**floors, "captions_cut": cut}


def _skipped(folder: RunFolder, data: TokenDataModule) -> None:
    """Print what a run that reads shards has skipped; skipped.json lists it, including what came before a resume."""
    shards = data.streamed
    if shards is None:
        return
    for line in shards.unread.unread_lines(shards.files):
        _say(line)
    names, counts = shards.found()
    if not counts:
        return
    path = folder.path / "skipped.json"
    try:
        names = {**((store.read_json(path) or {}).get("names") or {}), **names}
        store.write_json(path, {"counts": counts, "names": names})
        named = f"{path} lists them with the reasons"
    except (DamagedFile, OSError) as error:  # do not raise: the run has ended and its metrics are written
        named = f"{path}, which lists them, cannot be written ({error})"
    _say(f"{sum(counts.values())} samples and shards were skipped because they cannot be used: {named}")


def _first_step(run: RunConfig) -> int:
    return 0 if run.parent is None else run.parent.step


def _fork(run: RunConfig, folder: RunFolder, data: TokenDataModule) -> None:
    """Write the first checkpoint of a fork, from which the fork then resumes like any run."""
    from mmqk.training.fork import PROBE_SEQUENCES, START_NAME, make_fork

    if run.parent is None or checkpoints_in(folder.checkpoints) or (folder.path / START_NAME).exists():
        return
    _say(make_fork(run, folder.path, data.probe_batch(PROBE_SEQUENCES)))
    if run.parent.is_import:
        return
    parent = run.parent.config
    before = parent["optim"].get("schedule_steps") or parent["trainer"]["max_steps"]
    after = run.optim.schedule_steps or run.trainer.max_steps
    if run.optim.schedule != "constant" and after != before:
        _say(
            f"the learning rate follows a schedule of {after} steps, but the parent's had {before} steps: set"
            f" optim.schedule_steps={before} to keep it"
        )


def _environment() -> dict[str, Any]:
    packages = ("torch", "torchvision", "lightning", "timm", "webdataset", "tokenizers", "tensorboard", "numpy")
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "machine": {"system": platform.system(), "processor": platform.machine(), "cpus": os.cpu_count()},
    }


def _quieten() -> None:
    """Hide Lightning's tips and warnings that do not concern this run."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for about in (
        "does not have many workers",
        "isinstance.treespec",
        "Checkpoint directory",
        "Experiment logs directory",
        "does not have a",
    ):
        warnings.filterwarnings("ignore", message=f".*{about}.*")


if __name__ == "__main__":
    store.run_main(main)
