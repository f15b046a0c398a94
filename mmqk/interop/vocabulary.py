"""The number of ids of each modality in the configuration of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmqk.store import UserError

# Field of a Hugging Face config in which `to_transformers` stores the vocabulary sizes: pairs [name, size] in the
# order of the ids.
# A mapping would lose the order, because config.json has sorted keys.
STORED_SIZES = "mmqk_vocab_sizes"
_IMAGE_PREFIX = "IMGIMG"  # prefix of the image tokens in Chameleon's vocabulary_map


def vocab_sizes_of(config: Any, vocab_size: int, given: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return the number of ids by modality.

    These are the given sizes, otherwise those stored in the configuration, otherwise those of its vocabulary_map.

    Raises:
        UserError: the sizes do not add up to the vocabulary, or the image ids have gaps.
    """
    stored = getattr(config, STORED_SIZES, None)
    if given is None and stored is None:
        return _by_vocabulary(getattr(config, "vocabulary_map", None) or {}, vocab_size)
    try:
        pairs = list(given.items() if given is not None else stored or ())
        vocab_sizes = {name: int(size) for name, size in pairs}
        if len(vocab_sizes) < len(pairs) or any(vocab_sizes[name] != size for name, size in pairs):
            raise ValueError
    except (TypeError, ValueError):
        raise UserError(
            f"The model's config.{STORED_SIZES} is {stored!r}, not names and sizes: give vocab_sizes."
        ) from None
    if not vocab_sizes or sum(vocab_sizes.values()) != vocab_size:
        named = ", ".join(f"{name}={size}" for name, size in vocab_sizes.items())
        raise UserError(
            f"The sizes {named or '(none)'} add up to {sum(vocab_sizes.values())}, but the vocabulary has"
            f" {vocab_size} ids: give each id to one modality."
        )
    return vocab_sizes


def _by_vocabulary(vocabulary: Mapping[str, int], vocab_size: int) -> dict[str, int]:
    image = [i for name, i in vocabulary.items() if name.startswith(_IMAGE_PREFIX)]
    if not all(isinstance(i, int) for i in image):
        raise UserError("The model's config.vocabulary_map has image ids that are not integers: give vocab_sizes.")
    image.sort()
    if not image:
        return {"text": vocab_size}
    start, end = image[0], image[-1] + 1
    if image != list(range(start, end)) or end > vocab_size:
        raise UserError(
            f"The {len(image)} image ids of config.vocabulary_map are not one range within the {vocab_size} ids: give"
            " vocab_sizes, such as text=300,image=32."
        )
    # The ids before the image ids are text if no ids follow the image ids, otherwise they are special tokens.
    before, after = ("text", "") if end == vocab_size else ("special", "text")
    sizes = {before: start, "image": end - start, after: vocab_size - end}
    return {name: size for name, size in sizes.items() if size}


def chameleon_vocabulary(vocab_sizes: Mapping[str, int]) -> dict[str, int]:
    """Return a vocabulary_map with the names of the image tokens only, in the order of the ids of block `image`.

    Chameleon spells the number in letters: code 12 is IMGIMGBCZ.
    """
    start, vocabulary = 0, {}
    for name, size in vocab_sizes.items():
        if name == "image":
            for code in range(size):
                letters = "".join(chr(ord("A") + int(digit)) for digit in str(code))
                vocabulary[f"{_IMAGE_PREFIX}{letters}Z"] = start + code
        start += size
    return vocabulary
