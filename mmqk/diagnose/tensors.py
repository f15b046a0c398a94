"""Checkpoints of any tool as tensors by name: `read`. No file that is read can execute code.

A tensor is read from the disk when it is asked for, so a model of 7 billion parameters does not have to fit into
memory.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmqk.checkpoint import PREFIX, newest_checkpoint
from mmqk.model.ranges import allow_patch, named_function
from mmqk.monitors.adapters import clean
from mmqk.store import UserError, read_json
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


class Tensors(Mapping[str, Tensor]):
    """Tensors by name. Each is read when it is asked for, and is not kept.

    Args:
        readers: for each name, a function that reads the tensor.
    """

    def __init__(self, readers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._readers = dict(readers)

    def __getitem__(self, name: str) -> Tensor:
        return self._readers[name]().detach()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


@dataclass(frozen=True)
class Weights:
    """One checkpoint.

    Attributes:
        source: the path or ``module:function`` as given.
        format: "mmqk checkpoint", "Hugging Face folder", "torch.distributed checkpoint", "safetensors", "PyTorch file"
            or "function".
        tensors: the weights by name, without the parts of names that wrappers add. Optimizer states are left out.
        config: fields of the configuration; empty if the checkpoint has none.
        step: optimizer step, from the content or else from the name; None if neither has one.
    """

    source: str
    format: str
    tensors: Tensors
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
        raise UserError(f"{source} cannot be read ({reason_of(error)}): check that its files are complete.") from error
    if not weights.tensors:
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
    flat = _flat(content)
    if kind == "mmqk checkpoint":
        flat = {name.removeprefix(PREFIX): tensor for name, tensor in flat.items()}
    readers = {clean(name): partial(lambda x: x, tensor) for name, tensor in flat.items()}
    return Weights(source, kind, Tensors(readers), config, _step(source) if step is None else step)


def _fields(config: Any) -> dict[str, Any]:
    if hasattr(config, "to_dict"):
        return dict(config.to_dict())
    if is_dataclass(config) and not isinstance(config, type):
        return asdict(config)
    return dict(config) if isinstance(config, Mapping) else dict(getattr(config, "__dict__", {}))


def _flat(content: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of nested dicts by dotted name, without those of optimizers."""
    if isinstance(content, Tensor):
        return {prefix: content}
    flat: dict[str, Tensor] = {}
    for key, value in content.items() if isinstance(content, Mapping) else ():
        if not str(key).startswith("optim"):
            flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _step(source: str | Path) -> int | None:
    """Return the step in the name of a file or of its folder, such as checkpoint-500; None if there is none."""
    parts = Path(source).absolute().parts[-2:]
    return next((int(found[1]) for part in reversed(parts) if (found := _STEP_NAME.search(part))), None)


def _config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "config.json", advice="restore it from a copy.") or {}


def _file(path: Path) -> Weights:
    config = _config(path.parent)
    if path.suffix == ".safetensors":
        return Weights(str(path), "safetensors", Tensors(_safetensors([path])), config, _step(path))
    content = _load(path)
    if isinstance(content, Mapping) and "mmqk_model" in content:
        check_digest(path)
    return _of_object(str(path), "PyTorch file", content, config)


def _load(path: Path) -> Any:
    """Return the content of a file of torch.save, memory-mapped where its format allows it."""
    with open(path, "rb") as file:
        is_zip = file.read(2) == b"PK"
    return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)


def _safetensors(paths: list[Path]) -> dict[str, Callable[[], Tensor]]:
    from safetensors import safe_open

    files = [safe_open(path, "pt") for path in paths]
    return {clean(name): partial(file.get_tensor, name) for file in files for name in file.keys()}  # noqa: SIM118


def _folder(folder: Path) -> Weights:
    """Read a Hugging Face folder."""
    if (folder / "adapter_config.json").exists():
        raise UserError(f"{folder} has an adapter (adapter_config.json): merge it into the weights first.")
    readers: dict[str, Callable[[], Tensor]] = {}
    for pattern in ("model*.safetensors", "*.safetensors", "pytorch_model*.bin"):
        if paths := sorted(folder.glob(pattern)):
            shards = [] if pattern.endswith(".safetensors") else [_of_object("", "", _load(p), {}) for p in paths]
            readers = {name: partial(s.tensors.__getitem__, name) for s in shards for name in s.tensors}
            readers = readers or _safetensors(paths)
            break
    else:
        raise UserError(
            f"{folder} has no weights that mmqk reads: give a folder with .safetensors or pytorch_model.bin, with"
            f" {_METADATA}, or with checkpoints/."
        )
    for index in folder.glob(f"{paths[0].name.partition('-')[0]}*.index.json"):
        shard_of = (read_json(index, "download it again.") or {}).get("weight_map", {})
        lost = next((name for name in shard_of if clean(name) not in readers), None)
        if lost is not None:
            raise UserError(f"{folder} has no {lost}, which {index.name} lists in {shard_of[lost]}: add that file.")
    state = read_json(folder / "trainer_state.json", "restore it from a copy.") or {}
    step = state.get("global_step", _step(folder))
    return Weights(str(folder), "Hugging Face folder", Tensors(readers), _config(folder), step)


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

    entries = {
        name: entry
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith("optim")
    }
    readers = {clean(name): partial(tensor, name, entry) for name, entry in entries.items()}
    return Weights(str(folder), "torch.distributed checkpoint", Tensors(readers), _config(folder), _step(folder))
