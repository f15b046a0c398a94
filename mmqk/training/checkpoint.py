"""Reading and writing checkpoints: each is written with a digest, and checked before it is used."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor

from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.store import UserError, differing_fields, naming
from mmqk.store.checkpoints import (
    DamagedError,
    checkpoints_in,
    has_digest,
    named_step,
    strays_in,
    write_checkpoint,
)

# In the content: this file was written with a digest, so that one without it is damaged.
MARK = "mmqk_digest"
# What a run goes on from, beside the model: names and kinds.
PARTS: dict[str, type] = {"optimizer_states": list, "lr_schedulers": list, "loops": dict, "callbacks": dict}
PREFIX = "model."
ONE = {"strategy": "auto", "processes": 1}  # the processes of a checkpoint that does not record them


class CheckpointError(Exception):
    """Why a checkpoint cannot be used; the message continues "The checkpoint X"."""


class CheckpointFiles(TorchCheckpointIO):
    """Lightning's checkpoint files, with a digest."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        save_checkpoint(checkpoint, Path(path))


def save_checkpoint(content: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint whole or not at all, and read it back from the disk.

    Raises:
        OSError: the file cannot be written, or reads back otherwise; ``path`` is then as it was.
    """
    write_checkpoint(path, lambda file: torch.save({**content, MARK: "sha256"}, file))  # type: ignore[arg-type]


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a checkpoint on the CPU, mapped from the file, after its digest, step and weights were checked.

    A file that was written without a digest, by an older mmqk, is read with a line on stderr.

    Raises:
        CheckpointError: it cannot be used.
        OSError: the disk does not give it.
    """
    if not path.is_file():
        raise CheckpointError("is no file")
    try:
        with naming(path):
            checked = has_digest(path)
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except DamagedError as error:
        raise CheckpointError(str(error)) from error
    except OSError:
        raise  # a disk error does not mean that the content is damaged
    except Exception as error:  # torch, zip and pickle each have errors of their own
        said = " ".join(str(error).split()).partition(". ")[0][:120].rstrip(".:") or type(error).__name__
        raise CheckpointError(f"cannot be read ({said})") from error
    if not isinstance(content, dict) or not isinstance(content.get("mmqk_model"), dict):
        raise CheckpointError("has no model configuration: it was not written by mmqk.train")
    if not checked and MARK in content:
        raise CheckpointError("is damaged: the sha256 at its end is missing")
    step = content.get("global_step", 0)
    if type(step) is not int or step < 0:
        raise CheckpointError("has no number of steps in its part global_step")
    if "global_step" in content and named_step(path) not in (None, step):
        raise CheckpointError(f"holds step {step}, but its name has another step")
    _check_weights(content)
    if not checked:
        _say_unchecked(path)
    return content


def _check_weights(content: dict[str, Any]) -> None:
    """Whether the weights are those of the configuration beside them, by name and shape."""
    try:
        with torch.device("meta"):  # no initial weights are drawn
            model = EarlyFusionTransformer(ModelConfig.from_dict(content["mmqk_model"]), "math")
    except Exception as error:
        raise CheckpointError("has a model that this version of mmqk does not know") from error
    there = content.get("state_dict")
    if not isinstance(there, dict):
        raise CheckpointError("lacks its part state_dict")
    expected = {PREFIX + name: tensor.shape for name, tensor in model.state_dict().items()}
    for name in sorted(expected.keys() | there.keys(), key=str):
        if name not in there:
            raise CheckpointError(f"lacks the weights {name}")
        if name not in expected:
            raise CheckpointError(f"has weights {name}, which its model does not have")
        if not isinstance(there[name], Tensor) or there[name].shape != expected[name]:
            raise CheckpointError(f"has weights {name} that are not of shape {tuple(expected[name])}")


@functools.cache
def _say_unchecked(path: Path) -> None:
    print(
        f"The checkpoint {path} has no sha256, because an older mmqk wrote it: its content is not verified.",
        file=sys.stderr,
        flush=True,
    )


def check_parts(content: Mapping[str, Any]) -> None:
    """Whether a run can go on from a checkpoint, or be forked from it.

    Raises:
        CheckpointError: a part is missing or of another kind.
    """
    if "global_step" not in content:
        raise CheckpointError("lacks its part global_step")
    for name, kind in PARTS.items():
        if name not in content:
            raise CheckpointError(f"lacks its part {name}")
        part = content[name]
        of_records = not isinstance(part, list) or (part and isinstance(part[0], dict))
        if not isinstance(part, kind) or not of_records:
            raise CheckpointError(f"has a misshapen part {name}")
    optimizer = content["optimizer_states"][0]
    for name, kind in (("state", dict), ("param_groups", list)):
        if not isinstance(optimizer.get(name), kind):
            raise CheckpointError("has a misshapen part optimizer_states")


def check_run(content: Mapping[str, Any], model: ModelConfig, id: str) -> None:
    """Whether a checkpoint is of a run, so that the run can go on from it.

    Attention scale, caps and dropout have no parameters: nothing but the stored configuration tells two such
    models apart.

    Raises:
        CheckpointError: a part is missing, or its model or its run is another one.
    """
    check_parts(content)
    differing = differing_fields(content["mmqk_model"], asdict(model))
    if differing:
        raise CheckpointError(f"is of another model ({', '.join(f'model.{n}' for n in differing)} differ)")
    ranks = content.get("mmqk_ranks", ONE)
    if not isinstance(ranks, dict) or ranks.keys() != ONE.keys():
        raise CheckpointError("has a misshapen part mmqk_ranks")
    writer = content.get("mmqk_run")
    if isinstance(writer, dict) and writer.get("id") != id:
        raise CheckpointError(f"is of run {writer.get('id')} and not of this run, {id}")


def load_checkpoint(path: Path, advice: str = "name another one", whole: bool = False) -> dict[str, Any]:
    """The content of a checkpoint, on the CPU, checked by `read_checkpoint`.

    Args:
        path: of the file.
        advice: the end of the sentence that refuses it.
        whole: it must have what a run goes on from, too.

    Raises:
        UserError: it cannot be used.
    """
    try:
        content = read_checkpoint(path)
        if whole:
            check_parts(content)
        return content
    except CheckpointError as error:
        raise UserError(f"The checkpoint {path} {error}: {advice}.") from error


def newest_checkpoint(run: Path) -> Path:
    """The newest checkpoint of a run folder, by its name.

    Raises:
        UserError: there is none.
    """
    found = checkpoints_in(run / "checkpoints")
    if not found:
        strays = strays_in(run / "checkpoints")
        named = f" named step<step>.ckpt, only {strays[0].name}" if strays else ""
        raise UserError(f"{run} has no checkpoint{named}: name the folder of a run that wrote one.")
    return found[-1]


def load_model(run: Path | str, backend: str = "math") -> EarlyFusionTransformer:
    """The model of a run's newest checkpoint, from the configuration stored in it, in fp32 and evaluation mode.

    Raises:
        UserError: the run has no checkpoint, or the newest one cannot be used.
    """
    path = newest_checkpoint(Path(run))
    checkpoint = load_checkpoint(path, "remove it to take the one before, or name another run")
    config = ModelConfig.from_dict(checkpoint["mmqk_model"])
    with torch.device("meta"):
        model = EarlyFusionTransformer(config, backend)
    model.to_empty(device="cpu")
    if config.tie_embeddings:
        model.head.weight = model.embed.weight
    model.load_state_dict({k.removeprefix(PREFIX): v for k, v in checkpoint["state_dict"].items()})
    return model.eval()
