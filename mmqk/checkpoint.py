"""The content of a checkpoint: read, written, checked, and turned into a model.

`mmqk.store.checkpoint_files` has names and digests, `mmqk.training.saving` writes during a run and finds the checkpoint
of a resume, and `mmqk.diagnose.tensors` reads checkpoints of other tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.model.patch import is_allowed
from mmqk.store import UserError, differing_fields, naming
from mmqk.store.checkpoint_files import (
    CheckpointError,
    check_digest,
    checkpoints_in,
    named_step,
    strays_in,
    write_checkpoint,
)
from mmqk.store.errors import reason_of

PREFIX = "model."


def save_checkpoint(content: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint completely or not at all, and read it back from the disk.

    Raises:
        OSError: the file cannot be written, or its content differs when read back. ``path`` is then unchanged.
    """
    write_checkpoint(path, lambda file: torch.save(dict(content), file))  # type: ignore[arg-type]


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Check the digest, the step and the weights of a checkpoint, and return its content. The tensors are on the CPU
    and memory-mapped.

    Raises:
        CheckpointError: the checkpoint cannot be used.
        OSError: the file cannot be read from the disk.
    """
    if not path.is_file():
        raise CheckpointError("is not a file")
    try:
        with naming(path):
            check_digest(path)
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (CheckpointError, OSError):
        raise  # a disk error does not mean that the content is damaged
    except Exception as error:  # torch, zip and pickle raise different errors
        raise CheckpointError(f"cannot be read ({reason_of(error)})") from error
    if not isinstance(content, dict) or not isinstance(content.get("mmqk_model"), dict):
        raise CheckpointError("has no model configuration: it was not written by mmqk.train")
    step = content.get("global_step")
    if step is not None and named_step(path) not in (None, step):
        raise CheckpointError(f"holds step {step}, but its name has another step")
    _check_weights(content)
    return content


def _check_weights(content: dict[str, Any]) -> None:
    """Check the names and shapes of the weights against the stored configuration."""
    patch = str(content["mmqk_model"].get("patch", ""))
    if not is_allowed(patch):
        raise CheckpointError(f"names code, which runs only if you name it too (model.patch={patch})")
    try:
        with torch.device("meta"):  # do not draw initial weights
            model = EarlyFusionTransformer(ModelConfig.from_dict(content["mmqk_model"]), "math")
    except Exception as error:
        raise CheckpointError(f"has a model that this version of mmqk does not support ({reason_of(error)})") from error
    try:
        model.load_state_dict(weights_of(content), assign=True)
    except Exception as error:
        raise CheckpointError(f"has weights that do not fit its model configuration ({reason_of(error)})") from error


def weights_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights in a checkpoint by their names in the model."""
    return {name.removeprefix(PREFIX): tensor for name, tensor in content["state_dict"].items()}


def check_run(content: Mapping[str, Any], model: ModelConfig, id: str) -> None:
    """Check that a checkpoint belongs to a run, so that the run can resume from it.

    Attention scale, caps and dropout have no parameters: only the stored configuration shows whether they differ.

    Raises:
        CheckpointError: the checkpoint has only weights, or belongs to another model or run.
    """
    if "global_step" not in content:
        raise CheckpointError("has only weights, such as those of an import: a run cannot resume from it")
    # `from_dict` adds the fields that the version of mmqk that wrote the checkpoint did not have.
    differing = differing_fields(asdict(ModelConfig.from_dict(content["mmqk_model"])), asdict(model))
    if differing:
        raise CheckpointError(f"is of another model (different: {', '.join(f'model.{n}' for n in differing)})")
    writer = content.get("mmqk_run")
    if isinstance(writer, dict) and writer.get("id") != id:
        raise CheckpointError(f"is of run {writer.get('id')} and not of this run, {id}")


def load_checkpoint(path: Path, advice: str = "name another one") -> dict[str, Any]:
    """Check a checkpoint with `read_checkpoint`, and return its content.

    Args:
        path: The file.
        advice: What the user should do, as the end of the error message.

    Raises:
        UserError: the checkpoint cannot be used.
    """
    try:
        return read_checkpoint(path)
    except CheckpointError as error:
        raise UserError(f"The checkpoint {path} {error}: {advice}.") from error


def newest_checkpoint(run: Path) -> Path:
    """Return the newest checkpoint of a run folder, by the step in its name.

    Raises:
        UserError: the folder has none.
    """
    checkpoints = checkpoints_in(run / "checkpoints")
    if not checkpoints:
        strays = strays_in(run / "checkpoints")
        named = f" named step<step>.ckpt, only {strays[0].name}" if strays else ""
        raise UserError(f"{run} has no checkpoint{named}: name the folder of a run that wrote one.")
    return checkpoints[-1]


def load_model(run: Path | str) -> EarlyFusionTransformer:
    """Return the model of a run's newest checkpoint, in fp32 and evaluation mode, with the attention backend math.

    The model is built from the configuration in the checkpoint.

    Raises:
        UserError: the run has no checkpoint, or the newest one cannot be used.
    """
    path = newest_checkpoint(Path(run))
    return model_of(load_checkpoint(path, "remove it to use the one before, or name another run"))


def model_of(checkpoint: Mapping[str, Any]) -> EarlyFusionTransformer:
    """Return the model of a checkpoint that `load_checkpoint` has read, in fp32 and evaluation mode."""
    return built(ModelConfig.from_dict(checkpoint["mmqk_model"]), weights_of(checkpoint)).eval()


def built(config: ModelConfig, weights: Mapping[str, Tensor], backend: str = "math") -> EarlyFusionTransformer:
    """Return a model with these weights in fp32, on their device."""
    with torch.device("meta"):  # do not draw initial weights
        model = EarlyFusionTransformer(config, backend)
    model.to_empty(device=next(iter(weights.values())).device)
    if config.tie_embeddings:
        model.head.weight = model.embed.weight
    model.load_state_dict(weights)
    return model
