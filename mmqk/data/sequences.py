"""Token cache -> sequences: how captions, image codes and text become rows of a TokenBatch.

A pair is ``<bos> <image> codes </image> caption <eos>`` or ``<bos> caption <image> codes </image> <eos>``, a
text row ``<bos>`` and a window of the text stream, an image row ``<bos> <image> codes </image> <eos>``.
One document a row; short rows are padded at the end, where causal attention never looks.
"""

from __future__ import annotations

import numpy as np
import torch

from mmqk.data.batch import TokenBatch
from mmqk.data.cache import TokenCache
from mmqk.data.mix import Epochs, Mixture, random_stream
from mmqk.tokenizers.vocabulary import BEGIN_IMAGE, BOS, END_IMAGE, EOS, PAD, JointVocabulary

SHORTEST_CAPTION = 8


class SequenceBuilder:
    """Rows of at most ``seq_len`` tokens out of one split of the cache.

    A caption that does not fit beside its image is cut on the right; ``caption_room`` says how much fits and
    ``captions_cut`` how many do not.

    Raises:
        ValueError: ``seq_len`` leaves a pair's caption fewer than 8 tokens.
    """

    def __init__(self, cache: TokenCache, vocabulary: JointVocabulary, seq_len: int):
        self.cache, self.vocabulary, self.seq_len = cache, vocabulary, seq_len
        self.caption_room = seq_len - cache.codes_NG.shape[1] - 4
        if self.caption_room < SHORTEST_CAPTION:
            least = seq_len - self.caption_room + SHORTEST_CAPTION
            raise ValueError(
                f"data.seq_len {seq_len} is too short for an image of {cache.codes_NG.shape[1]} codes and its"
                f" caption: at least {least} is needed."
            )

    @property
    def captions_cut(self) -> float:
        """Share of the captions that are longer than there is room for."""
        return float((np.diff(self.cache.offsets) > self.caption_room).mean())

    def image(self, item: int) -> np.ndarray:
        return np.concatenate([[BOS], self._image(item), [EOS]])

    def pair(self, item: int, image_first: bool, caption: int | None = None) -> np.ndarray:
        """An image and its caption, or the caption of another item."""
        image = self._image(item)
        words = self.cache.caption(item if caption is None else caption)[: self.caption_room]
        text = self.vocabulary.text(words)
        body = [image, text] if image_first else [text, image]
        return np.concatenate([[BOS], *body, [EOS]])

    def text(self, start: int) -> np.ndarray:
        window = self.cache.text[start : start + self.seq_len - 1]
        # The stream stores document ends as -1, so that it can be read without a vocabulary.
        return np.concatenate([[BOS], np.where(window < 0, EOS, self.vocabulary.text(window))])

    def _image(self, item: int) -> np.ndarray:
        return np.concatenate([[BEGIN_IMAGE], self.vocabulary.image(self.cache.codes_NG[item]), [END_IMAGE]])

    def batch(self, rows: list[np.ndarray], step_targets: int | None = None) -> TokenBatch:
        """Pads rows to one TokenBatch; ``step_targets`` defaults to this batch's own count of targets."""
        ids_BT = np.full((len(rows), self.seq_len), PAD, dtype=np.int64)
        for b, row in enumerate(rows):
            ids_BT[b, : len(row)] = row
        lengths = np.array([len(row) for row in rows])
        place_T = np.arange(self.seq_len)
        valid_BT = place_T < lengths[:, None]
        target_mask_BT = place_T < lengths[:, None] - 1
        if step_targets is None:
            step_targets = int(target_mask_BT.sum())
        modality_BT = (ids_BT >= self.vocabulary.blocks["text"]).astype(np.int64)
        return TokenBatch(
            ids_BT=torch.from_numpy(ids_BT),
            modality_BT=torch.from_numpy(modality_BT),
            target_mask_BT=torch.from_numpy(target_mask_BT),
            valid_BT=torch.from_numpy(valid_BT),
            step_targets=torch.tensor(step_targets),
        )


class TrainingOrder:
    """The endless training sequences of a run: row ``index`` is a function of (config, seed, index)."""

    def __init__(self, builder: SequenceBuilder, weights: dict[str, float], image_first: float, seed: int):
        self.builder = builder
        self.mixture = Mixture(weights, image_first, seed)
        window = builder.seq_len - 1
        self.seed, self.window = seed, window
        n_pairs, n_text = len(builder.cache.codes_NG), len(builder.cache.text) // window - 1
        wants = {kind for kind, weight in weights.items() if weight > 0}
        self._pairs = Epochs(n_pairs, seed, stream=1) if "pair" in wants else None
        self._text = Epochs(n_text, seed, stream=2) if "text" in wants else None
        self._images = Epochs(n_pairs, seed, stream=3) if "image" in wants else None

    def row(self, index: int) -> np.ndarray:
        """Token ids of the sequence at place ``index``, at most ``seq_len`` long."""
        slot, nth = self.mixture.draw(index)
        if slot == "text":
            assert self._text is not None
            epoch, item = self._text.item(nth)
            # Windows start elsewhere in each epoch, so that a document is not always cut in the same place.
            offset = int(random_stream(self.seed, 4, epoch).integers(self.window))
            return self.builder.text(offset + item * self.window)
        if slot == "image":
            assert self._images is not None
            return self.builder.image(self._images.item(nth)[1])
        assert self._pairs is not None
        return self.builder.pair(self._pairs.item(nth)[1], image_first=slot == "image_first")


def validation_rows(builder: SequenceBuilder, n: int) -> list[np.ndarray]:
    """The fixed validation sequences: the same for every arm and seed.

    Of four rows two are pairs with the image first and last, one more pair in alternating order, and one is
    text, so that any first few rows hold both modalities and both orders.
    """
    n_pairs, window = len(builder.cache.codes_NG), builder.seq_len - 1
    n_windows = len(builder.cache.text) // window
    rows, pair, text = [], 0, 0
    for i in range(n):
        if i % 4 == 3:
            # Spread over the whole held-out stream, which is many speeches and glosses.
            rows.append(builder.text(text * n_windows // max(1, n // 4 + 1) * window))
            text += 1
        else:
            if pair >= n_pairs:
                raise ValueError(f"data.val_sequences {n} asks for more than the {n_pairs} held-out pairs.")
            rows.append(builder.pair(pair, image_first=pair % 2 == 0))
            pair += 1
    return rows
