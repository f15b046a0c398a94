"""Names of logged series: ``statistic/modality/layerNN/headNN``.

loss                                     one series per run
loss/image                               by modality
q_norm/text/layer03                      by modality and layer
attn_logit_absmax/text-image/layer03     by query and key modality, and layer
attn_logit_bound/layer03                 by layer
.../layer03/head02                       by head
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

_LAYER = re.compile(r"layer(\d{2,})")
_HEAD = re.compile(r"head(\d{2,})")


class Tag(NamedTuple):
    """The parts of a tag; ``modality`` is "text", or "text-image" for query text and key image."""

    statistic: str
    modality: str | None = None
    layer: int | None = None
    head: int | None = None

    @property
    def pair(self) -> tuple[str, str] | None:
        """(query modality, key modality), or None when the tag has one modality or none."""
        query, dash, key = (self.modality or "").partition("-")
        return (query, key) if dash else None


def tag(statistic: str, *modalities: str, layer: int | None = None, head: int | None = None) -> str:
    """Build a tag from a statistic, up to two modality names (query, key), a layer and a head.

    Raises:
        ValueError: more than two modalities, a head without a layer, or a name that `parse_tag` could not parse.
    """
    if len(modalities) > 2:
        raise ValueError(f"a tag has at most two modalities (query, key), not {modalities}")
    if head is not None and layer is None:
        raise ValueError(f"head {head} of {statistic} needs a layer")
    if not statistic or "/" in statistic:
        raise ValueError(f"a statistic's name has no '/' and is not empty: {statistic!r}")
    for name in modalities:
        if not name or "/" in name or "-" in name or _LAYER.fullmatch(name):
            raise ValueError(f"a modality's name has no '/' or '-' and is not like layer03: {name!r}")
    parts = [statistic]
    if modalities:
        parts.append("-".join(modalities))
    if layer is not None:
        parts.append(f"layer{layer:02d}")
    if head is not None:
        parts.append(f"head{head:02d}")
    return "/".join(parts)


def parse_tag(text: str) -> Tag:
    """Return the parts of ``text``, the inverse of `tag`.

    Raises:
        ValueError: ``text`` is not a tag.
    """
    statistic, *rest = text.split("/")
    head = layer = None
    if rest and (match := _HEAD.fullmatch(rest[-1])) and len(rest) > 1 and _LAYER.fullmatch(rest[-2]):
        head = int(match[1])
        rest.pop()
    if rest and (match := _LAYER.fullmatch(rest[-1])):
        layer = int(match[1])
        rest.pop()
    if not statistic or len(rest) > 1 or "" in rest:
        raise ValueError(f"{text!r} is not a tag of the form statistic/modality/layerNN/headNN")
    return Tag(statistic, rest[0] if rest else None, layer, head)


@lru_cache(maxsize=65536)
def parsed_tag(name: str) -> Tag:
    """Return the parts of a tag; a name that is not a tag becomes the statistic."""
    try:
        return parse_tag(name)
    except ValueError:
        return Tag(name)
