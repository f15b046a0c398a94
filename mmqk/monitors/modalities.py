"""Modalities of tokens: from ranges of ids, a function of the model's inputs, or the model's config.

Shapes: B batch, T tokens, M modalities.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmqk.monitors.adapters import unwrapped
from mmqk.monitors.foreign.inputs import Inputs
from mmqk.store.errors import UserError
from mmqk.store.formatting import some
from mmqk.store.metrics import tag

# Id ranges of each modality except text, or a function from the inputs to (B, T) modality numbers.
Modality = Mapping[str, range | Sequence[range]] | Callable[[Mapping[str, Any]], Tensor]

_IMAGE_CODES = ("IMGIMG", "<|visual token")  # how the names of image codes begin in Chameleon and in Emu3


class Modalities:
    """Maps tokens to modalities.

    Args:
        modality: ``{"image": range(a, b)}``, the id range or ranges of each modality. Other ids are text; with ``{}``
            all ids are text. It may also be a function that gets the model's inputs by name and returns (B, T), the
            modality number of each token over which attention runs. A token with a number outside 0 to M - 1 has no
            modality.
        names: if ``modality`` is a function, the names of modalities 0 to M - 1; else ignored.

    Attributes:
        names: the M names.
        ranges: id ranges by modality; None if ``modality`` is a function.
        origin: what the first line says of ranges that were read from the model's config; else empty.

    Raises:
        UserError: a range overlaps another, is empty or has a step other than 1, or a name is not a valid tag.
    """

    def __init__(self, modality: Modality, names: Sequence[str] = ("text", "image")):
        self.function, self.origin = modality if callable(modality) else None, ""
        if isinstance(names, str) or len(set(names)) < max(1, len(names)):
            raise UserError(f"names is {names!r}: give one or more different names, such as ('text', 'image')")
        if self.function is None and not isinstance(modality, Mapping):
            raise UserError(
                f'modality is {modality!r}: give ranges of ids, such as {{"image": range(4, 8196)}}, or a function'
            )
        self.ranges: dict[str, list[range]] | None = None
        if isinstance(modality, Mapping):
            parts = {str(name): list(x) if isinstance(x, list | tuple) else [x] for name, x in modality.items()}
            self.ranges = {"text": [], **parts}  # type: ignore[dict-item]
            _check_ranges(self.ranges)
        self.names = tuple(names if self.ranges is None else self.ranges)
        for name in self.names:
            check_name("modality", name)

    def of(self, inputs: Inputs) -> Tensor:
        """Return the modality numbers, (B, T)."""
        if self.function is not None:
            modality_BT = self.function(inputs.named)
            if not isinstance(modality_BT, Tensor) or modality_BT.ndim != 2:
                is_tensor = isinstance(modality_BT, Tensor)
                returned = f"shape {tuple(modality_BT.shape)}" if is_tensor else type(modality_BT).__name__
                raise UserError(f"the modality function returned {returned}: return modality numbers (B, T)")
            return modality_BT.long()
        if inputs.ids is None:
            raise UserError(
                f"modality has id ranges, but the model's inputs ({', '.join(inputs.named)}) have no token ids: "
                "pass a function from the inputs to modality numbers (B, T)"
            )
        return self.of_ids(inputs.ids[1])

    def of_ids(self, ids: Tensor) -> Tensor:
        """Return the modality numbers of ids of any shape, by the ranges."""
        assert self.ranges is not None
        number = torch.zeros_like(ids, dtype=torch.long)
        for m, name in enumerate(self.names):
            for part in self.ranges[name]:
                number = torch.where((ids >= part.start) & (ids < part.stop), m, number)
        return number


def modalities_of(model: nn.Module, modality: Modality | None, names: Sequence[str] = ("text", "image")) -> Modalities:
    """Return the modalities that the user gives or, if ``modality`` is None, those in the model's config.

    The config of a model of transformers names the id of the placeholder of an image, a video or a sound
    (``image_token_id``, in older models ``image_token_index``). The ids of image codes are in ``vocabulary_map``.
    """
    if modality is not None:
        return Modalities(modality, names)
    config = getattr(unwrapped(model), "config", None)
    found = _ids_of_config(config)
    modalities, kind = Modalities({name: _ranges_of(ids) for name, ids in found.items()}), type(config).__name__
    words = [f"{name} is id {some(map(str, sorted(ids)), 1)}" for name, ids in found.items()]
    modalities.origin = f"modality from {kind}: {', '.join(words)}"
    if not found:
        modalities.origin = "all tokens are text, because no modality is given" + f" or in {kind}" * bool(config)
    return modalities


def _ids_of_config(config: Any) -> dict[str, set[int]]:
    """Return the ids of each modality except text that a config or one of its parts names."""
    found: dict[str, set[int]] = {}
    parts = [config, *(x for x in getattr(config, "__dict__", {}).values() if hasattr(x, "__dict__"))]
    for name in ("image", "video", "audio"):
        fields = [getattr(part, f"{name}_token_{end}", None) for part in parts for end in ("id", "index")]
        ids = {x for x in fields if isinstance(x, int) and x >= 0}.difference(*found.values())
        codes = getattr(config, "vocabulary_map", None) if name == "image" else None
        ids |= {i for token, i in (codes or {}).items() if token.startswith(_IMAGE_CODES)}
        if ids:
            found[name] = ids
    return found


def _ranges_of(ids: set[int]) -> list[range]:
    starts, stops = (sorted(i for i in ids if i + by not in ids) for by in (-1, 1))
    return [range(start, stop + 1) for start, stop in zip(starts, stops, strict=True)]


def check_name(option: str, name: str) -> None:
    try:
        tag("q_norm", name)
    except ValueError as error:
        raise UserError(f"{option}: {error}") from error


def _check_ranges(ranges: Mapping[str, list[range]]) -> None:
    if len(ranges) < 2 and ranges["text"]:
        raise UserError(
            'modality has only text: give the ids of another modality, such as {"image": range(4, 8196)}, or {} if '
            "all ids are text"
        )
    for name, parts in ranges.items():
        if any(not isinstance(part, range) or part.step != 1 or part.start < 0 or not part for part in parts):
            raise UserError(
                f"modality: {name} is {parts}: give ranges of ids from 0 up, not empty and with step 1, or pass a "
                "function from the model's inputs to modality numbers (B, T)"
            )
        if not parts and name != "text":
            raise UserError(f"modality: {name} has no ids: give a range of ids")
    spans = sorted((part.start, part.stop, name) for name, parts in ranges.items() for part in parts)
    for (_, end, one), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise UserError(
                f"modality: ids {start} to {end - 1} are both {one} and {other}: give ranges that do not overlap"
            )
