"""Pairs whose image has another caption or is left out: the values of ``data.pairing`` other than matched."""

from __future__ import annotations

import numpy as np

from mmqk.data.mixture import random_stream
from mmqk.data.tokens.folder import TokenStore

# Seed of the permutation, which is the same for every run.
SHUFFLE_SEED = 26


class ShuffledPairs:
    """Pairs in which every image has the caption of another pair of its split.

    The captions are permuted in one cycle, so each image and each caption occurs once and no pair keeps its caption.
    The permutation depends on the number of pairs only.

    Args:
        pairs: the documents of a split.

    Raises:
        ValueError: there is only one pair.
    """

    def __init__(self, pairs: TokenStore) -> None:
        n = len(pairs)
        if n == 1:
            raise ValueError("data.pairing 'shuffled' needs two pairs in each split: hold out more, or none.")
        self.image_tokens = pairs.image_tokens if n else 0
        self._pairs = pairs
        order = random_stream(SHUFFLE_SEED, n).permutation(n)
        self.caption_of_N = np.empty(n, dtype=np.int64)
        self.caption_of_N[order] = np.roll(order, 1)
        self.lengths_N = pairs.lengths_N[self.caption_of_N]  # all images have the same length
        self.tokens = int(self.lengths_N.sum())

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, n: int) -> np.ndarray:
        """Return the ids of document n, int64."""
        caption = self._pairs[int(self.caption_of_N[n])][self.image_tokens :]
        return np.concatenate([self._pairs[n][: self.image_tokens], caption])


class Captions:
    """The captions of pairs, without their images.

    Args:
        pairs: the documents of a split.
    """

    image_tokens = 0

    def __init__(self, pairs: TokenStore) -> None:
        self._pairs = pairs
        self._removed = pairs.image_tokens if len(pairs) else 0
        self.lengths_N = pairs.lengths_N - self._removed
        self.tokens = int(self.lengths_N.sum())

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, n: int) -> np.ndarray:
        """Return the ids of document n, int64."""
        return self._pairs[n][self._removed :]
