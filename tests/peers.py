"""A peer: the outside implementation or written-out formula with which a test compares a remedy.

Each test module lists its peers in `PEERS`. docs/remedies.md prints them in the column "equals".
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
