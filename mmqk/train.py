"""Train one run: one configuration in, one folder out. ``python -m mmqk.train --help``."""

from __future__ import annotations

import logging
import os
import platform
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mmqk.store import EXIT_CODES, MetricsWriter, RunFolder, run_main

FLUSH_EVERY = 10


def main(argv: list[str] | None = None) -> int:
    """Train, resume or find finished the run that ``argv`` describes; the exit code says how it stands.

    Raises:
        UserError: a mistake in the configuration, the data or the folder.
    """
    argv = sys.argv[1:] if argv is None else argv
    from mmqk.config import print_yaml, resolve

    run = resolve(argv)
    if run.print_config:
        print(print_yaml(run), end="")
        return 0
    details = {"config": run.nested(), "command": ["python", "-m", "mmqk.train", *argv], **_environment()}
    with RunFolder.open(run.out, run.identity, details) as folder:
        if folder.state == "finished":
            status = folder.status()
            stale = "; its code has changed since" if folder.stale else ""
            print(f"{run.out} is {status.status} at step {status.step}{stale}: nothing to train.", flush=True)
            return 0
        if folder.state == "new":
            folder.config_path.write_text(print_yaml(run))
        return _fit(run, folder)


def _fit(run, folder: RunFolder) -> int:
    import lightning as L
    import torch

    from mmqk.data.module import TokenDataModule
    from mmqk.monitors import NormMonitor
    from mmqk.training.lifecycle import Interrupted, Lifecycle, ProgressLine
    from mmqk.training.loggers import RunLogger, StoryLogger
    from mmqk.training.module import TrainingModule
    from mmqk.training.steps import Checkpoints, StepLog

    _quieten()
    if run.threads:
        torch.set_num_threads(run.threads)
    module = TrainingModule(run.model, run.loss, run.optim, run.seed, run.backend)
    data = TokenDataModule(run.data, run.seed)
    data.setup()
    resume_from = _last_checkpoint(folder)
    heldout = data.probe_batch(run.monitor.sequences) if run.monitor.batch == "heldout" else None

    step_log = StepLog(FLUSH_EVERY, run.optim.warmup_steps)
    checkpoints = Checkpoints(folder.checkpoints, run.checkpoint, step_log)
    callbacks = [
        step_log,
        NormMonitor(run.monitor, heldout),
        checkpoints,
        Lifecycle(folder, step_log, checkpoints),
    ]
    if not run.quiet:
        callbacks.append(ProgressLine(step_log))
    loggers: list[Any] = [
        RunLogger(folder.metrics_path),
        StoryLogger(folder.path, run.model.modalities, run.monitor.tensorboard_layers),
    ]
    if resume_from is None:
        at_start = {f"val_unigram/{m}": nats for m, nats in data.unigram_loss().items()}
        loggers[0].log_metrics({**at_start, "captions_cut": data.builder.captions_cut}, 0)
        if data.builder.captions_cut:
            print(
                f"{data.builder.captions_cut:.1%} of the captions are longer than {data.builder.caption_room} tokens"
                " and are cut: raise data.seq_len to keep them whole.",
                file=sys.stderr,
            )
    trainer = L.Trainer(
        **run.trainer,
        max_epochs=-1,
        logger=loggers,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        log_every_n_steps=1,
    )
    try:
        trainer.fit(module, datamodule=data, ckpt_path=resume_from, weights_only=True)
    except Interrupted as stop:
        print(
            f"interrupted at step {trainer.global_step}; the same command goes on from there.",
            file=sys.stderr,
        )
        return 128 + stop.signum
    except SystemExit:  # how Lightning leaves on a second Ctrl-C
        return EXIT_CODES["interrupted"]
    status = folder.status()
    if status.status == "diverged":
        print(f"diverged at step {status.step}: {status.reason}", file=sys.stderr)
    if not run.quiet:
        print(f"{status.status} at step {status.step} in {folder.path}")
        print(f"dashboards: python -m tensorboard.main --logdir {folder.path} --samples_per_plugin scalars=0")
    return EXIT_CODES[status.status]


def _last_checkpoint(folder: RunFolder) -> Path | None:
    """The newest checkpoint; later lines of metrics.jsonl, whose steps will be trained again, are dropped."""
    from mmqk.training.steps import checkpoints_in, step_of

    found = checkpoints_in(folder.checkpoints)
    if folder.metrics_path.exists():
        writer = MetricsWriter(folder.metrics_path)
        writer.truncate_after(step_of(found[-1]) if found else -1)
        writer.close()
    if folder.state == "resume":
        print(f"resuming from step {step_of(found[-1]) if found else 0} in {folder.path}", file=sys.stderr)
    return found[-1] if found else None


def _environment() -> dict[str, Any]:
    packages = (
        "torch",
        "torchvision",
        "lightning",
        "timm",
        "webdataset",
        "tokenizers",
        "tensorboard",
        "numpy",
    )
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "machine": {"system": platform.system(), "processor": platform.machine(), "cpus": os.cpu_count()},
    }


def _quieten() -> None:
    """Lightning's tips and notices, which say nothing about this run."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for about in (
        "does not have many workers",
        "isinstance.treespec",
        "Checkpoint directory",
        "does not have a",
    ):
        warnings.filterwarnings("ignore", message=f".*{about}.*")


if __name__ == "__main__":
    run_main(main)
