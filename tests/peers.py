"""A peer: the outside implementation or written-out formula with which a test compares a remedy.

The test modules list their peers (`PEERS`), each with the functions that it compares. The page of remedies prints
them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """One comparison that shows that some remedies are correct.

    `remedies` are keys of `mmqk.remedies.REMEDIES`; `name` is the outside implementation as printed in
    docs/remedies.md ("timm LayerScale", "transformers Qwen3ForCausalLM", "formula written out"); `tolerance` is the
    largest absolute difference that the test allows, in values and in gradients, at `precision`.
    """

    remedies: tuple[str, ...]
    name: str
    tolerance: float
    precision: str = "fp64"
