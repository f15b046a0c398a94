"""References in tests that need a newer release of a library than mmqk itself needs."""

from __future__ import annotations

from importlib.metadata import version

import torch
from packaging.version import Version

# The first weight that `draws_other_weights` draws with torch 2.14 and 2.15.
FIRST_WEIGHT = -0.0099


def older(package: str, release: str) -> bool:
    return Version(version(package)) < Version(release)


def draws_other_weights() -> bool:
    """Return whether the initial weights of this torch differ from those of the torch of the stored numbers.

    ``trunc_normal_`` of torch 2.11 gives other numbers from the same generator than that of torch 2.14.
    """
    weights = torch.nn.init.trunc_normal_(torch.empty(64, 64), std=0.02, generator=torch.Generator().manual_seed(5))
    return abs(float(weights[0, 0]) - FIRST_WEIGHT) > 1e-4
