"""Cuts a batch to its first sequences, with the images and videos that these sequences contain.

Shapes: B batch, T tokens, n images, P patches of all images.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmqk.monitors.foreign.inputs import Inputs, fields_of, find_ids, tensors

# Prefix of the inputs that belong to images or videos, and the fields of a transformers config with their token id.
_VISION = {"image": ("image_token_id", "image_token_index"), "video": ("video_token_id", "video_token_index")}


class UncuttableError(Exception):
    """Raised for a batch whose images cannot be assigned to its sequences; the message gives the reason."""


def batch_size(inputs: Inputs) -> int:
    """Return B: the number of rows of the token ids, else of the first tensor with at least two axes, else the length
    of the first list of tensors."""
    ids = find_ids(inputs)
    if ids is not None:
        return len(ids[1])
    rows = next((len(x) for _, x in tensors(inputs) if x.ndim > 1), None)
    return next(map(len, _lists(inputs)), 0) if rows is None else rows


def _lists(value: Any) -> Iterator[list[Tensor]]:
    """Yield the nested lists that contain only tensors."""
    if isinstance(value, list) and value and all(isinstance(x, Tensor) for x in value):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _lists(part)
    else:
        for part in fields_of(value).values():
            yield from _lists(part)


def first_rows(value: Any, inputs: Inputs, root: nn.Module, rows: int, dtype: torch.dtype | None = None) -> Any:
    """Return ``value``, a call's arguments, with the first ``rows`` of B sequences and the images that they contain.

    A tensor is sliced on its first axis if that axis has B entries. An integer tensor with three axes (positions in
    height, width and time) is sliced on its second axis. Tensors of images that are not listed by sequence are sliced
    after the last image of the sequences (`_vision_entries`).

    Args:
        value: nested mappings, sequences, dataclasses and other objects with tensors.
        inputs: the same arguments by name.
        root: the model, whose config names the ids of image and video tokens.
        rows: number of sequences.
        dtype: replaces the dtype of half-precision tensors.

    Raises:
        UncuttableError: the images cannot be assigned to the sequences.
    """
    B = batch_size(inputs)
    entries = {} if rows >= B else _vision_entries(inputs, root, rows)
    return _cut(value, B, rows, dtype, entries)


def _vision_entries(inputs: Inputs, root: nn.Module, rows: int) -> dict[int, int]:
    """Return the number of first entries to keep of each tensor that lists images or patches of the whole batch, by
    the tensor's `id`.

    Images are in the order of their tokens. Where a grid gives the patches of each image (``image_grid_thw``), a
    token stands for the same number of patches in all images; without a grid all images have equally many tokens.
    """
    ids, named, entries = find_ids(inputs), list(tensors(inputs)), dict[int, int]()
    config = getattr(root, "config", None)
    for kind, fields in _VISION.items():
        token = next((t for f in fields if (t := getattr(config, f, None)) is not None), None)
        if ids is None or token is None:
            continue
        counts_B = (ids[1] == token).sum(1)
        total, kept = int(counts_B.sum()), int(counts_B[:rows].sum())
        pixels = "pixel_values_videos" if kind == "video" else "pixel_values"
        own = [(name, x) for name, x in named if name in (pixels, f"{kind}_sizes", f"{kind}_grid_thw")]
        grid = next((x for name, x in own if name == f"{kind}_grid_thw"), None)
        if grid is not None:
            ends_n = grid.prod(-1).cumsum(0).tolist()
            ends = dict(zip([0, *ends_n], range(len(grid) + 1), strict=True))  # patches up to an image -> images
            patches = kept * ends_n[-1] // max(total, 1)
            if not total or kept * ends_n[-1] % total or patches not in ends:
                raise UncuttableError(f"{kind}_grid_thw does not fit the {kind} tokens of its {len(ids[1])} rows")
            for _, x in own:
                entries[id(x)] = patches if len(x) == ends_n[-1] and x is not grid else ends[patches]
            for name, x in named:
                if name == "second_per_grid_ts" and kind == "video" and len(x) == len(grid):
                    entries[id(x)] = ends[patches]
            continue
        by_row = [x for name, x in own if name == pixels and x.ndim >= 5 and len(x) == len(ids[1])]
        flat = next((x for name, x in own if name == pixels), None)
        if by_row or flat is None:
            continue
        per_image, rest = divmod(total, len(flat))
        if rest or not per_image or (counts_B % per_image).any():
            raise UncuttableError(f"its {len(flat)} {kind}s cannot be assigned to {len(ids[1])} rows")
        entries |= {id(x): kept // per_image for _, x in own if len(x) == len(flat)}
    return entries


def _cut(value: Any, B: int, rows: int, dtype: torch.dtype | None, entries: Mapping[int, int]) -> Any:
    if isinstance(value, Tensor):
        low = value.dtype in (torch.float16, torch.bfloat16)
        if (kept := entries.get(id(value))) is not None:
            if not kept:
                return None  # the sequences have no images: as if the model was called with text alone
            value = value[:kept]
        elif rows >= B:
            pass
        elif value.ndim == 3 and not value.is_floating_point() and value.shape[1] == B and len(value) <= 4:
            value = value[:, :rows]
        elif value.ndim and value.shape[0] == B:
            value = value[:rows]
        return value.to(dtype) if low and dtype is not None else value
    if hasattr(value, "batch_select_indices"):  # a cache of transformers
        if rows < B:
            value = copy.deepcopy(value)
            value.batch_select_indices(torch.arange(rows))
        return value
    if type(value).__name__ == "BlockMask":
        return value[:rows] if value.shape[0] == B > rows else value
    if isinstance(value, Mapping):
        changed = {key: _cut(part, B, rows, dtype, entries) for key, part in value.items()}
        if all(changed[key] is part for key, part in value.items()):
            return value
        new = copy.copy(value)
        for key, part in changed.items():
            new[key] = part  # type: ignore[index]
        return new
    if isinstance(value, tuple | list):
        by_row = isinstance(value, list) and len(value) == B and all(isinstance(x, Tensor) for x in value)
        if by_row and any(x.shape[:1] != (B,) for x in value):
            value, B = value[:rows], rows  # one tensor for each sequence
        parts = [_cut(x, B, rows, dtype, entries) for x in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    parts_by_name = fields_of(value)
    changed = {name: _cut(part, B, rows, dtype, entries) for name, part in parts_by_name.items()}
    changed = {name: part for name, part in changed.items() if part is not parts_by_name[name]}
    if changed:
        value = copy.copy(value)
        for name, part in changed.items():
            object.__setattr__(value, name, part)  # also of a frozen dataclass
    return value
