"""Finds and checks the checkpoint that a run resumes from: the newest valid one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mmqk.checkpoint import CheckpointError, check_run, read_checkpoint
from mmqk.store import MetricsWriter, RunFolder, UserError
from mmqk.store.checkpoints import PARTIAL_SUFFIX, checkpoints_in, set_aside, step_of, strays_in
from mmqk.training.loop.lightning_private import raised_by_loading

if TYPE_CHECKING:
    from mmqk.config import RunConfig


def last_checkpoint(run: RunConfig, folder: RunFolder, first_step: int) -> Path | None:
    """Return the newest valid checkpoint, and remove later lines of metrics.jsonl, because their steps run again.

    Newer checkpoints that cannot be used are renamed, and a line on stderr reports each of them.

    Args:
        run: The resolved configuration.
        folder: The run folder.
        first_step: First step of the run: 0, or the step at which a fork starts.

    Returns:
        None if the run has no checkpoint.

    Raises:
        UserError: the run has checkpoints, but none can be used. The folder is then unchanged.
    """
    for stray in strays_in(folder.checkpoints):
        print(f"{stray} is ignored: it is not named like a checkpoint of mmqk.", file=sys.stderr)
    found, content = _newest_good(run, folder, first_step)
    step = step_of(found) if found is not None else 0
    for partial in folder.checkpoints.glob(f"*{PARTIAL_SUFFIX}"):
        partial.unlink()
    if folder.metrics_path.exists():
        writer = MetricsWriter(folder.metrics_path)
        # The resumed run logs the values of its first step again.
        writer.truncate_after(step if step > first_step else step - 1)
        writer.close()
    if folder.state == "resume":
        mixed = "; another version of the code computed part of it" if "+" in folder.record["code"] else ""
        print(f"resuming from step {step} in {folder.path}{mixed}", file=sys.stderr)
    if found is not None and (ranks := content["mmqk_ranks"]) != run.ranks:
        print(
            f"step {step} was reached by {_described(ranks)} and the run continues with {_described(run.ranks)}:"
            " later numbers agree with those of an unchanged run up to rounding, and dropout masks differ.",
            file=sys.stderr,
        )
    return found


def _newest_good(run: RunConfig, folder: RunFolder, first_step: int) -> tuple[Path | None, dict[str, Any]]:
    bad: list[tuple[Path, CheckpointError]] = []
    for path in reversed(checkpoints_in(folder.checkpoints)):
        try:
            content = read_checkpoint(path)
            check_run(content, run.model, run.id)
        except CheckpointError as error:
            bad.append((path, error))
            continue
        for refused, why in bad:
            aside = set_aside(refused).name
            print(
                f"The checkpoint {refused} {why}: it is renamed to {aside}, and an older one is used.",
                file=sys.stderr,
            )
        return path, content
    if bad:
        path, why = bad[0]
        raise UserError(
            f"The checkpoint {path} {why}, and no older one can be used: move it away to train from step {first_step}"
            " again."
        )
    return None, {}


@contextlib.contextmanager
def restoring(checkpoint: Path | None) -> Iterator[None]:
    """Turn an error that Lightning raises while it loads a checkpoint into a UserError; do not change other errors.

    Raises:
        UserError: a part of the checkpoint is malformed.
    """
    try:
        yield
    except Exception as error:
        if checkpoint is None or isinstance(error, UserError | OSError | torch.OutOfMemoryError):
            raise
        if not raised_by_loading(error):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120].rstrip('.:')}"
        raise _malformed(checkpoint, reason) from error


def check_restored(checkpoint: Path, step: int, optimizers: list[torch.optim.Optimizer]) -> None:
    """Check that a resumed run is at the step of its checkpoint, and that moments have the shapes of their
    parameters.

    Moments may have an additional first axis for the modalities.

    Args:
        checkpoint: A file of `checkpoints_in`.
        step: The step of the run.
        optimizers: The optimizers of the run.

    Raises:
        UserError: a part of the checkpoint is malformed.
    """
    if step != step_of(checkpoint):
        raise _malformed(checkpoint, f"loops are at step {step}")
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                shape = tuple(getattr(value, "shape", ()))
                if shape and shape[len(shape) - parameter.ndim :] != tuple(parameter.shape):
                    reason = f"{name} of shape {shape} for weights of shape {tuple(parameter.shape)}"
                    raise _malformed(checkpoint, reason)


def _malformed(checkpoint: Path, reason: str) -> UserError:
    return UserError(
        f"The checkpoint {checkpoint} has a malformed part ({reason}): move it away to use the previous one."
    )


def _described(ranks: dict[str, Any]) -> str:
    return (
        "one process" if ranks["processes"] == 1 else f"{ranks['processes']} processes ({ranks['strategy']})"
    )
