"""Parse the modalities of a vocabulary from a command line: `--vocab-sizes text=65536,image=8192`."""

from __future__ import annotations

from mmqk.store.errors import UserError
from mmqk.store.tags import tag


def parse_vocab_sizes(text: str) -> dict[str, int]:
    """Return the number of ids by modality, in the order of the ids.

    Raises:
        UserError: the text does not have this form, or a name cannot be part of a tag.
    """
    try:
        pairs = [(name.strip(), int(size)) for name, size in (part.split("=") for part in text.split(","))]
    except ValueError:
        pairs = []
    sizes, reason = dict(pairs), ""
    try:
        for name in sizes:
            tag("loss", name)
    except ValueError as error:
        reason = f" ({error})"
    invalid = not sizes or len(sizes) < len(pairs) or min(sizes.values()) < 1
    if reason or invalid or not all(name.isidentifier() for name in sizes):
        raise UserError(
            f"--vocab-sizes is {text!r}{reason}: give each modality once with its number of ids, such as"
            " text=65536,image=8192."
        )
    return sizes
