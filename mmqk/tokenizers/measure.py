"""PSNR of reconstructions, entropy and perplexity of token counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def psnr(images_BCHW: Tensor, reconstructions_BCHW: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of each image in dB, shape (B,). Pixels are in [0, 1]."""
    mse_B = (images_BCHW - reconstructions_BCHW).square().flatten(1).mean(1)
    return -10 * mse_B.clamp_min(1e-10).log10()


@dataclass(frozen=True)
class TokenStatistics:
    """Counts and unigram entropy of tokens.

    Attributes:
        tokens: number of tokens.
        used: number of vocabulary entries that occur.
        entropy: unigram entropy, nats (the plug-in estimate, which is too low for few tokens).
    """

    tokens: int
    used: int
    entropy: float

    @property
    def perplexity(self) -> float:
        """exp(entropy): the number of equally likely tokens with this entropy."""
        return float(torch.tensor(self.entropy).exp())

    @property
    def bits(self) -> float:
        """The entropy in bits."""
        return self.entropy / float(torch.tensor(2.0).log())


def token_statistics(ids: Tensor, size: int) -> TokenStatistics:
    """Return the statistics of a tensor of ids from 0 to size - 1, of any shape."""
    counts = torch.bincount(ids.flatten(), minlength=size).double()
    p = counts[counts > 0] / counts.sum()
    return TokenStatistics(int(counts.sum()), len(p), float(-(p * p.log()).sum()))
