"""Read and write folders of Hugging Face models and of runs of mmqk. Only local files are read."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.store import UserError, new_folder, read_json

from .names import IMAGE_TOKENIZER, READ
from .write import architecture_of, import_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHECKPOINT = "checkpoints/step00000000.ckpt"


def read_huggingface(folder: Path) -> PreTrainedModel:
    """Return the model that `save_pretrained` wrote to a folder, in the widest dtype of its weights.

    Raises:
        UserError: the architecture is unknown, files are damaged or missing, or transformers is not installed.
    """
    config = read_json(folder / "config.json", {"architectures": list | None}, "download the model again.")
    if config is None:
        raise UserError(f"{folder / 'config.json'} cannot be read: download the model again.")
    named = config.get("architectures") or ["none"]
    if named[0] not in READ:
        raise UserError(f"{folder} has the architecture {named[0]}: mmqk reads {', '.join(READ)}.")
    transformers = import_transformers()
    kind = getattr(transformers, named[0]).config_class.model_type
    if config.get("model_type", kind) != kind:
        raise UserError(
            f"{folder / 'config.json'} has the architecture {named[0]} but the model_type {config['model_type']}, not"
            f" {kind}: correct the wrong one."
        )
    if (folder / "adapter_config.json").exists():
        raise UserError(f"{folder} has an adapter (adapter_config.json): merge it into the weights first.")
    try:
        with _quiet(transformers):
            model, info = getattr(transformers, named[0]).from_pretrained(
                str(folder),
                local_files_only=True,
                dtype=_widest_dtype(folder),
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except Exception as error:  # transformers, safetensors and pickle raise different errors
        reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        raise UserError(
            f"{folder} cannot be loaded ({reason}): check that its files are complete."
        ) from error
    # transformers fills missing weights and weights of another shape with random numbers, and drops unknown weights.
    missing = sorted(name for name in info["missing_keys"] if not name.startswith(IMAGE_TOKENIZER))
    if missing:
        raise UserError(f"{folder} has no weights for {missing[0]}: check that its files are complete.")
    if info["mismatched_keys"]:
        name, stored, expected = sorted(info["mismatched_keys"])[0]
        raise UserError(
            f"{folder} has {name} of shape {tuple(stored)}, but config.json needs {tuple(expected)}: the files belong"
            " to two models."
        )
    unknown = sorted(info["unexpected_keys"])
    if unknown:
        raise UserError(f"{folder} has weights {unknown[0]}, which {named[0]} does not have.")
    return model.eval()


_FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def _widest_dtype(folder: Path) -> torch.dtype | str:
    """Return the dtype that can hold all weights of the safetensors files; "auto", the dtype in config.json, for
    other files."""
    found: set[torch.dtype] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 (not a mapping)
        found |= {_FLOATS[name] for name in names if name in _FLOATS}
    return functools.reduce(torch.promote_types, found) if found else "auto"


def read_run(checkpoint: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return the configuration and weights of a checkpoint of mmqk. The weights are memory-mapped and keep their
    dtype.

    Raises:
        UserError: the file is damaged or not a checkpoint, or no Hugging Face layout fits the model.
    """
    from mmqk.training.checkpoint import PREFIX, load_checkpoint

    content = load_checkpoint(checkpoint, "give another --from")
    config = ModelConfig.from_dict(content["mmqk_model"])
    architecture_of(config)
    return config, {name.removeprefix(PREFIX): tensor for name, tensor in content["state_dict"].items()}


def write_run(model: EarlyFusionTransformer, out: Path) -> None:
    """Write a folder that `mmqk.training.checkpoint.load_model` can read.

    Raises:
        UserError: `out` is not empty or cannot be written.
    """
    from mmqk.training.checkpoint import PREFIX, save_checkpoint

    weights = {PREFIX + name: tensor for name, tensor in model.state_dict().items()}
    with _publishing(out) as folder:
        save_checkpoint({"mmqk_model": asdict(model.config), "state_dict": weights}, folder / CHECKPOINT)


def write_huggingface(model: PreTrainedModel, out: Path, files: Mapping[str, str] | None = None) -> None:
    """Write a folder that `from_pretrained` can read. ``files`` maps the names of further files to their text.

    Raises:
        UserError: `out` is not empty or cannot be written.
    """
    with _publishing(out) as folder:
        with _quiet(import_transformers()):
            model.save_pretrained(folder)
        for name, text in (files or {}).items():
            (folder / name).write_text(text, encoding="utf-8")


def check_empty(out: Path) -> None:
    """Raise UserError if `out` exists and is not an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: give another --to.")


@contextlib.contextmanager
def _publishing(out: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `out` that is renamed to `out` at the end of the ``with`` block."""
    check_empty(out)
    try:
        with new_folder(out) as folder:
            yield folder
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk may raise any of them
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:120]
        raise UserError(f"{out} cannot be written ({reason}): give another --to.") from error


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Disable the log and progress bars of transformers; the caller reports errors as a UserError."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(log.CRITICAL)
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
