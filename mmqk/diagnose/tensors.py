"""Checkpoints of any tool as tensors by name, `read`, and as a model that is probed with a batch, `probe_with`. No file
that is read can execute code.

A tensor is read from the disk when it is asked for, so a model of 7 billion parameters does not have to fit into
memory.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import inspect
import itertools
import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmqk.checkpoint import PREFIX, load_checkpoint, model_of, newest_checkpoint
from mmqk.interop.folders import read_huggingface
from mmqk.model import EarlyFusionTransformer
from mmqk.model.patch import allow_patch, named_function
from mmqk.monitors import attach
from mmqk.monitors.adapters import clean
from mmqk.store import UserError, flatten, read_json
from mmqk.store.checkpoint_files import check_digest
from mmqk.store.errors import reason_of

# Keys of training checkpoints, the most specific first: the weights, the configuration, the step.
_STATES = ("state_dict", "model_state_dict", "model", "module")
_CONFIGS = ("mmqk_model", "model_args", "hyper_parameters", "config", "args")
_STEPS = ("global_step", "iter_num", "iteration", "step", "global_steps")
_STEP_NAME = re.compile(r"(?:step|checkpoint|iter|ckpt)[-_]?0*(\d+)")
_METADATA = ".metadata"  # the index of a folder of torch.distributed.checkpoint
# The only classes that this index may have.
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}  # fmt: skip


Readers = Mapping[str, Callable[[], Tensor]]


@dataclass(frozen=True)
class Weights:
    """One checkpoint.

    Attributes:
        source: the path or ``module:function`` as given.
        format: "mmqk checkpoint", "Hugging Face folder", "torch.distributed checkpoint", "safetensors", "PyTorch file"
            or "function".
        readers: a function for each weight by name, without the parts of names that wrappers add; it reads the tensor
            from the disk. Optimizer states are left out.
        config: fields of the configuration; empty if the checkpoint has none.
        step: optimizer step, from the content or else from the name; None if neither has one.
    """

    source: str
    format: str
    readers: Readers
    config: dict[str, Any]
    step: int | None


def read(source: str | Path) -> Weights:
    """Return the weights of a checkpoint.

    Args:
        source: a checkpoint or run folder of mmqk; a Hugging Face folder with safetensors or pytorch_model files,
            also in shards; a folder of torch.distributed.checkpoint; a file of torch.save or safetensors; or
            ``module:function``, the user's own code, which returns a model or a state dict.

    Raises:
        UserError: there is no such file, its content cannot be read without executing code, or a shard is missing.
    """
    path = Path(source)
    try:
        if not path.exists() and ":" in str(source):
            weights = _of_object(str(source), "function", call(str(source)), {})
        elif (path / _METADATA).is_file():
            weights = _distributed(path)
        elif path.is_dir() and (path / "checkpoints").is_dir():
            weights = _file(newest_checkpoint(path))
        else:
            weights = _folder(path) if path.is_dir() else _file(path)
    except UserError:
        raise
    except Exception as error:  # torch, safetensors, zip and pickle raise different errors
        held = re.search(r"GLOBAL ([\w.]+)", str(error))  # a class that torch.load refuses
        why = f"it holds a Python object, {held[1]}" if held else reason_of(error)
        advice = "save its state dict alone" if held else "check that its files are complete"
        raise UserError(f"{source} cannot be read ({why}): {advice}.") from error
    if not weights.readers:
        raise UserError(f"{source} has no weights: give a file or folder with the parameters of a model.")
    return weights


def call(source: str) -> Any:
    """Return what ``module:function`` returns.

    Raises:
        UserError: there is no such module or function.
    """
    try:
        allow_patch(source)
    except ValueError as error:
        raise UserError(f"{error}.") from None
    return named_function(source)()


def _of_object(source: str, kind: str, content: Any, config: dict[str, Any]) -> Weights:
    """Return the weights of a model, a state dict or the content of a training checkpoint."""
    step = None
    if isinstance(content, nn.Module):
        config = _fields(getattr(content, "config", {}))
        content = content.state_dict()
    if isinstance(content, Mapping):
        step = next((content[k] for k in _STEPS if type(content.get(k)) is int), None)
        kind = "mmqk checkpoint" if "mmqk_model" in content else kind
        config = next((found for k in _CONFIGS if (found := _fields(content.get(k)))), config)
        content = next((content[k] for k in _STATES if isinstance(content.get(k), dict)), content)
    else:
        content = {}
    prefix = PREFIX if kind == "mmqk checkpoint" else ""
    readers: Readers = {
        clean(name.removeprefix(prefix)): value.detach
        for name, value in flatten({k: v for k, v in content.items() if not str(k).startswith("optim")}).items()
        if isinstance(value, Tensor)
    }
    return Weights(source, kind, readers, config, _step(source) if step is None else step)


def _fields(config: Any) -> dict[str, Any]:
    if hasattr(config, "to_dict"):
        return dict(config.to_dict())
    if is_dataclass(config) and not isinstance(config, type):
        return asdict(config)
    return dict(config) if isinstance(config, Mapping) else dict(getattr(config, "__dict__", {}))


def _step(source: str | Path) -> int | None:
    """Return the step in the name of a file or of its folder, such as checkpoint-500; None if there is none."""
    parts = Path(source).absolute().parts[-2:]
    return next((int(found[1]) for part in reversed(parts) if (found := _STEP_NAME.search(part))), None)


def _config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "config.json", advice="restore it from a copy.") or {}


def _file(path: Path) -> Weights:
    config = _config(path.parent)
    if path.suffix == ".safetensors":
        return Weights(str(path), "safetensors", _safetensors([path]), config, _step(path))
    content = _load(path)
    if isinstance(content, Mapping) and "mmqk_model" in content:
        check_digest(path)
    return _of_object(str(path), "PyTorch file", content, config)


def _load(path: Path) -> Any:
    """Return the content of a file of torch.save, memory-mapped where its format allows it."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))


def _safetensors(paths: list[Path]) -> Readers:
    from safetensors import safe_open

    files = [safe_open(path, "pt") for path in paths]
    return {clean(name): partial(file.get_tensor, name) for file in files for name in file.keys()}  # noqa: SIM118


def _folder(folder: Path) -> Weights:
    """Read a Hugging Face folder."""
    if (folder / "adapter_config.json").exists():
        raise UserError(f"{folder} has an adapter (adapter_config.json): merge it into the weights first.")
    patterns = ("model*.safetensors", "*.safetensors", "pytorch_model*.bin")
    paths: list[Path] = next((found for pattern in patterns if (found := sorted(folder.glob(pattern)))), [])
    if not paths:
        files = f".safetensors, pytorch_model.bin, {_METADATA} or checkpoints/"
        raise UserError(f"{folder} has no weights that mmqk reads: give a folder with {files}.")
    if paths[0].suffix == ".safetensors":
        readers = _safetensors(paths)
    else:
        readers = {k: v for path in paths for k, v in _of_object("", "", _load(path), {}).readers.items()}
    for index in folder.glob(f"{paths[0].name.partition('-')[0]}*.index.json"):
        shard_of = (read_json(index, "download it again.") or {}).get("weight_map", {})
        lost = next((name for name in shard_of if clean(name) not in readers), None)
        if lost is not None:
            raise UserError(f"{folder} has no {lost}, which {index.name} lists in {shard_of[lost]}: add that file.")
    state = read_json(folder / "trainer_state.json", "restore it from a copy.") or {}
    step = state.get("global_step", _step(folder))
    return Weights(str(folder), "Hugging Face folder", readers, _config(folder), step)


class _Index(pickle.Unpickler):
    """Reads the index of torch.distributed.checkpoint, which is a pickle, with the classes of `_METADATA_CLASSES`."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) == ("torch", "Size") or name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its index names {module}.{name}, which is not data")


def _distributed(folder: Path) -> Weights:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

    with open(folder / _METADATA, "rb") as file:
        metadata: Metadata = _Index(file).load()
    metadata.storage_meta = metadata.storage_meta or StorageMeta()

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return metadata  # FileSystemReader would execute the code in a pickle

    def tensor(name: str, entry: TensorStorageMetadata) -> Tensor:
        state: dict[str, Any] = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            dcp.load(state, storage_reader=Reader(folder), no_dist=True)
        return state[name]

    readers = {
        clean(name): partial(tensor, name, entry)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith("optim")
    }
    return Weights(str(folder), "torch.distributed checkpoint", readers, _config(folder), _step(folder))


# Models -------------------------------------------------------------------------------------------------------------

Batch = dict[str, Tensor]  # model inputs by name
Blocks = Mapping[str, range]


def ranges_of(vocab_sizes: Mapping[str, int]) -> dict[str, range]:
    """Return the ids of each modality, given their numbers in the order of the ids."""
    ends = itertools.accumulate(vocab_sizes.values())
    return {name: range(end - size, end) for (name, size), end in zip(vocab_sizes.items(), ends, strict=True)}


def read_batch(path: Path) -> Batch:
    """Return the model inputs in a file: token ids (B, T) or (T,), or a dict of arrays by the names of the inputs.

    Args:
        path: a file of torch.save (.pt), numpy (.npz or .npy) or JSON. Ids without a name are called input_ids.

    Raises:
        UserError: the file cannot be read without executing code, or its rows have different lengths.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist: give a file of token ids.")
    try:
        if path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix in (".npz", ".npy"):
            content = np.load(path, allow_pickle=False)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
        named = dict(content) if hasattr(content, "keys") else {"input_ids": content}
        batch = {str(name): torch.as_tensor(value) for name, value in named.items()}
    except Exception as error:  # numpy, pickle and JSON raise different errors
        why = reason_of(error)
        raise UserError(f"{path} is not a batch ({why}): give token ids in rows of equal length.") from error
    return {name: x[None] if x.ndim == 1 else x for name, x in batch.items()}


def load(source: str | Path) -> nn.Module:
    """Return the model of a checkpoint or run of mmqk, of a Hugging Face folder, or of ``module:function``, in fp32
    and on the CPU.

    Raises:
        UserError: the source has no model that can be built, or its files are damaged.
    """
    path = Path(source)
    if not path.exists() and ":" in str(source):
        model = call(str(source))
        if not isinstance(model, nn.Module):
            raise UserError(f"{source} returned a {type(model).__name__}: return the model, with its weights.")
    elif (path / "config.json").exists():
        model = read_huggingface(path, None)
    elif path.suffix == ".ckpt" or (path / "checkpoints").is_dir():
        model = model_of(load_checkpoint(newest_checkpoint(path) if path.is_dir() else path))
    else:
        raise UserError(f"{source} has weights but no model: give module:function, your code that returns the model.")
    for parameter in model.parameters():  # one at a time; buffers, such as the frequencies of RoPE, stay
        parameter.data = parameter.data.float()
    return model.eval()


def inputs_of(model: nn.Module, batch: Batch) -> Batch:
    """Return the batch with the ids under the name that the model gives its first input.

    Raises:
        UserError: an id is outside the vocabulary.
    """
    names = list(inspect.signature(model.forward).parameters)
    inputs = {names[0] if name == "input_ids" and name not in names else name: x for name, x in batch.items()}
    embedding = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    ids = inputs.get("input_ids", inputs.get(names[0]))
    if embedding is not None and ids is not None and not ids.is_floating_point():
        size = embedding.num_embeddings
        if ids.min() < 0 or ids.max() >= size:
            raise UserError(f"The batch has the id {int(ids.max())}, but the model has {size} ids: give its own batch.")
    return inputs


def probe_with(source: str | Path, batch: Batch, modality: Blocks | None = None) -> dict[str, float]:
    """Return the statistics of docs/statistics.md that one forward pass measures, by tag.

    Args:
        source: as in `load`.
        batch: the inputs; all sequences are used.
        modality: id ranges by modality; other ids are text. By default those of an mmqk checkpoint, or those that the
            configuration of the model names.

    Raises:
        UserError: the model cannot be built, or cannot read this batch.
    """
    model = load(source)
    if modality is None and isinstance(model, EarlyFusionTransformer):
        modality = ranges_of(model.config.vocab_sizes)
    watch = attach(model, modality=modality, every_n_steps=0, sequences=len(next(iter(batch.values()))), matrices=True)
    try:
        return watch.probe(**inputs_of(model, batch)).flat()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{source} cannot read the batch ({reason_of(error)}): give its own batch.") from error
    finally:
        watch.close()
