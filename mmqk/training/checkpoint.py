"""A trained model out of a run folder."""

from __future__ import annotations

import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.store import UserError, differing_fields
from mmqk.training.steps import checkpoints_in


def check_checkpoint(path: Path, model: ModelConfig) -> dict[str, Any]:
    """Its content; refuse a file that is damaged or of another model, before anything of the run is touched.

    Attention scale, caps and dropout have no parameters: nothing but the stored configuration tells two such
    models apart.

    Raises:
        UserError: the file cannot be read, was not written by mmqk.train, or its model differs.
    """
    content = load_checkpoint(path)
    stored = content.get("mmqk_model")
    if stored is None:
        raise UserError(
            f"The checkpoint {path} has no model configuration: it was not written by mmqk.train."
        )
    differing = differing_fields(stored, asdict(model))
    if differing:
        named = ", ".join(f"model.{name}" for name in differing)
        raise UserError(f"The checkpoint {path} is of another model ({named} differ): remove it.")
    return content


def load_checkpoint(
    path: Path, advice: str = "delete it, and the run goes on from the one before"
) -> dict[str, Any]:
    """The content of a checkpoint, on the CPU.

    Raises:
        UserError: it cannot be read; the sentence ends with ``advice``.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        said = " ".join(str(error).split())[:120] or type(error).__name__
        raise UserError(f"The checkpoint {path} cannot be read ({said}): {advice}.") from error


def load_model(run: Path | str, backend: str = "math") -> EarlyFusionTransformer:
    """The model of a run's newest checkpoint, from the configuration stored in it, in fp32 and evaluation mode.

    Raises:
        UserError: the run has no checkpoint, or it cannot be read.
    """
    found = checkpoints_in(Path(run) / "checkpoints")
    if not found:
        raise UserError(f"{run} has no checkpoint: name the folder of a run that wrote one.")
    checkpoint = load_checkpoint(found[-1])
    try:
        config = ModelConfig.from_dict(checkpoint["mmqk_model"])
        with torch.device("meta"):  # no initial weights are drawn
            model = EarlyFusionTransformer(config, backend)
        model.to_empty(device="cpu")
        if config.tie_embeddings:
            model.head.weight = model.embed.weight
        model.load_state_dict({k.removeprefix("model."): v for k, v in checkpoint["state_dict"].items()})
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"The checkpoint {found[-1]} is of no model this mmqk knows: name another run."
        ) from error
    return model.eval()
