"""A trained model out of a run folder."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from mmqk.model import EarlyFusionTransformer, ModelConfig, QKNormConfig
from mmqk.store import UserError
from mmqk.training.steps import checkpoints_in


def load_model(run: Path | str, backend: str = "math") -> EarlyFusionTransformer:
    """The model of a run's newest checkpoint, built from the configuration stored in it, in evaluation mode.

    Raises:
        UserError: the run has no checkpoint, or it cannot be read.
    """
    found = checkpoints_in(Path(run) / "checkpoints")
    if not found:
        raise UserError(f"{run} has no checkpoint: name the folder of a run that wrote one.")
    try:
        checkpoint = torch.load(found[-1], map_location="cpu", weights_only=True)
        stored = dict(checkpoint["mmqk_model"])
        config = ModelConfig(**{**stored, "qk_norm": QKNormConfig(**stored["qk_norm"])})
        weights = {k.removeprefix("model."): v for k, v in checkpoint["state_dict"].items()}
        model = EarlyFusionTransformer(config, backend)
        model.load_state_dict(weights)
    except (OSError, RuntimeError, pickle.UnpicklingError, KeyError, TypeError, EOFError) as error:
        said = " ".join(str(error).split())[:120]
        raise UserError(
            f"The checkpoint {found[-1]} cannot be read ({said}): delete it, or name another run."
        ) from error
    return model.eval()
