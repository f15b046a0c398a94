"""Which ids of a Hugging Face vocabulary are of which modality, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmqk.store import UserError, tag

# Field of a Hugging Face config in which `to_transformers` notes the blocks: [name, size] in the order of the ids,
# which a mapping would lose, as config.json is written with sorted keys.
NOTED = "mmqk_blocks"
_IMAGE_PREFIX = "IMGIMG"  # of image tokens in Chameleon's vocabulary_map


def blocks_of(config: Any, vocab_size: int, given: Mapping[str, int] | None = None) -> dict[str, int]:
    """Number of ids by modality: as given, as noted, or as Chameleon's vocabulary says.

    Raises:
        UserError: they do not add up to the vocabulary, or the image ids have gaps.
    """
    noted = getattr(config, NOTED, None)
    if given is None and noted is None:
        return _by_vocabulary(getattr(config, "vocabulary_map", None) or {}, vocab_size)
    try:
        pairs = list(given.items() if given is not None else noted or ())
        blocks = {name: int(size) for name, size in pairs}
        if len(blocks) < len(pairs) or any(blocks[name] != size for name, size in pairs):
            raise ValueError
    except (TypeError, ValueError):
        raise UserError(
            f"The model's config.{NOTED} is {noted!r}, not names and sizes: give blocks."
        ) from None
    if not blocks or sum(blocks.values()) != vocab_size:
        named = ", ".join(f"{name}={size}" for name, size in blocks.items())
        raise UserError(
            f"The blocks {named or 'are none and'} add up to {sum(blocks.values())}, but the vocabulary has"
            f" {vocab_size} ids: give each id to one modality."
        )
    return blocks


def _by_vocabulary(vocabulary: Mapping[str, int], vocab_size: int) -> dict[str, int]:
    image = [i for name, i in vocabulary.items() if name.startswith(_IMAGE_PREFIX)]
    if not all(isinstance(i, int) for i in image):
        raise UserError(
            "The model's config.vocabulary_map has image ids that are no whole numbers: give blocks."
        )
    image.sort()
    if not image:
        return {"text": vocab_size}
    start, end = image[0], image[-1] + 1
    if image != list(range(start, end)) or end > vocab_size:
        raise UserError(
            f"The {len(image)} image ids of config.vocabulary_map are not one range within the {vocab_size} ids: give"
            " blocks, such as text=300,image=32."
        )
    # With nothing behind the image, what stands before it is the text; else it is the special tokens.
    before, after = ("text", "") if end == vocab_size else ("special", "text")
    sizes = {before: start, "image": end - start, after: vocab_size - end}
    return {name: size for name, size in sizes.items() if size}


def chameleon_vocabulary(blocks: Mapping[str, int]) -> dict[str, int]:
    """A vocabulary_map with the names of image tokens alone: code n of the block `image`, in the order of its ids.

    Chameleon spells the number in letters: code 12 is IMGIMGBCZ.
    """
    start, vocabulary = 0, {}
    for name, size in blocks.items():
        if name == "image":
            for code in range(size):
                letters = "".join(chr(ord("A") + int(digit)) for digit in str(code))
                vocabulary[f"{_IMAGE_PREFIX}{letters}Z"] = start + code
        start += size
    return vocabulary


def parse_blocks(text: str) -> dict[str, int]:
    """The blocks of a command line, such as `text=65536,image=8192`.

    Raises:
        UserError: anything else, or a name that no tag can carry.
    """
    try:
        pairs = [(name.strip(), int(size)) for name, size in (part.split("=") for part in text.split(","))]
        for name, _ in pairs:
            tag("loss", name)
    except ValueError:
        pairs = []
    blocks = dict(pairs)
    if not blocks or len(blocks) < len(pairs) or min(blocks.values()) < 1:
        raise UserError(
            f"--blocks is {text!r}: give each modality once with its number of ids, such as text=65536,image=8192."
        )
    return blocks
