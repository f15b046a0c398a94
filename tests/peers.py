"""A peer: the outside implementation or written-out formula with which a test compares a remedy.

Each test module lists its peers in `PEERS`. docs/remedies.md prints them in the column "equals".
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """One comparison that shows that some remedies are correct.

    Attributes:
        remedies: keys of `mmqk.lab.remedies.REMEDIES`.
        name: the outside implementation as printed in docs/remedies.md, such as "timm LayerScale".
        tolerance: the largest absolute difference of values and gradients that the test allows.
        precision: the precision of the computation.
    """

    remedies: tuple[str, ...]
    name: str
    tolerance: float
    precision: str = "fp64"
