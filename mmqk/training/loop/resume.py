"""Where a run resumes: its newest valid checkpoint."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mmqk.store import MetricsWriter, RunFolder, UserError
from mmqk.store.checkpoints import PARTIAL_SUFFIX, checkpoints_in, set_aside, step_of, strays_in
from mmqk.store.missing import DAMAGED_SUFFIX, RECORDS, examine
from mmqk.training.checkpoint import ONE, CheckpointError, check_run, read_checkpoint

if TYPE_CHECKING:
    from mmqk.config import RunConfig


def last_checkpoint(run: RunConfig, folder: RunFolder, first_step: int) -> Path | None:
    """The newest good checkpoint; later lines of metrics.jsonl, whose steps come again, are dropped.

    Newer ones that cannot be used are renamed, with a line on stderr for each.

    Args:
        first_step: that the run begins at: 0, or that of its fork.

    Returns:
        None where the run has no checkpoint.

    Raises:
        UserError: it has some, and none can be used; nothing is changed then.
    """
    for stray in strays_in(folder.checkpoints):
        print(f"{stray} is not named as mmqk names a checkpoint: it is ignored.", file=sys.stderr)
    found, content = _newest_good(run, folder, first_step)
    step = step_of(found) if found is not None else 0
    for partial in folder.checkpoints.glob(f"*{PARTIAL_SUFFIX}"):
        partial.unlink()
    if step > first_step:
        _examine(folder, first_step, step, content)
    if folder.metrics_path.exists():
        writer = MetricsWriter(folder.metrics_path)
        # What the first step says comes again too.
        writer.truncate_after(step if step > first_step else step - 1)
        writer.close()
    if folder.state == "resume":
        mixed = "; part of it was made by other code" if "+" in folder.record["code"] else ""
        print(f"resuming from step {step} in {folder.path}{mixed}", file=sys.stderr)
    ranks = content.get("mmqk_ranks", ONE)
    if found is not None and ranks != run.ranks:
        print(
            f"step {step} was reached by {_said(ranks)} and goes on with {_said(run.ranks)}: the same numbers up to"
            " rounding, and other masks where there is dropout; not bit for bit.",
            file=sys.stderr,
        )
    return found


def _examine(folder: RunFolder, first_step: int, step: int, content: dict[str, Any]) -> None:
    """Print which metrics and alarms are missing up to the checkpoint, and mark the run."""
    own = content["callbacks"].get("Checkpoints") or {}
    try:
        lost = examine(folder.path, first_step, step, own.get("written"))
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}): move it away.") from error
    if before := own.get("lost"):  # also where status.json was removed since
        folder.mark_lost(before.split("; "))
    if lost:
        folder.mark_lost(lost)
        print(
            f"{folder.path}: {' and '.join(lost)}. The run continues and is marked in status.json, and no"
            " verdict uses it: train it with another --out to get these numbers.",
            file=sys.stderr,
        )
    for name in RECORDS:
        if (folder.path / f"{name}{DAMAGED_SUFFIX}").exists():
            print(f"Damaged lines are kept in {folder.path / name}{DAMAGED_SUFFIX}.", file=sys.stderr)


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
                f"The checkpoint {refused} {why}: it is now {aside}, and an older one is taken.",
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
    """Turn an error of Lightning's while it takes up a checkpoint into a sentence; others pass.

    Raises:
        UserError: a part of the checkpoint is misshapen.
    """
    try:
        yield
    except Exception as error:
        frames = traceback.walk_tb(error.__traceback__)
        if checkpoint is None or isinstance(error, UserError | OSError | torch.OutOfMemoryError):
            raise
        if not any("checkpoint_connector" in frame.f_globals.get("__name__", "") for frame, _ in frames):
            raise
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:120].rstrip('.:')}"
        raise _misshapen(checkpoint, said) from error


def check_restored(checkpoint: Path, step: int, optimizers: list[torch.optim.Optimizer]) -> None:
    """Whether a run stands where its checkpoint says, with moments of the shapes of its parameters.

    Moments may have modalities before those.

    Args:
        checkpoint: a file that `checkpoints_in` found.
        step: that the run is at.
        optimizers: of the run.

    Raises:
        UserError: a part of the checkpoint is misshapen.
    """
    if step != step_of(checkpoint):
        raise _misshapen(checkpoint, f"loops are at step {step}")
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                shape = tuple(getattr(value, "shape", ()))
                if shape and shape[len(shape) - parameter.ndim :] != tuple(parameter.shape):
                    said = f"{name} of shape {shape} for weights of shape {tuple(parameter.shape)}"
                    raise _misshapen(checkpoint, said)


def _misshapen(checkpoint: Path, said: str) -> UserError:
    return UserError(
        f"The checkpoint {checkpoint} has a misshapen part ({said}): move it away to take the one before."
    )


def _said(ranks: dict[str, Any]) -> str:
    return (
        "one process" if ranks["processes"] == 1 else f"{ranks['processes']} processes ({ranks['strategy']})"
    )
