"""Measure whether captions lower the loss of image tokens: ``python -m data.build.caption_gain --run FOLDER``.

Compute the image loss of a trained model on held-out pairs that begin with the caption: once with the true caption,
once with the caption of another emoji. If image codes had no information about the content, both losses would be
equal. Several vendors draw the same emoji, and all these images share one caption, so the independent samples are
captions, not images.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from scipy import stats
from torch import Tensor

from mmqk.data.sequences import SequenceBuilder
from mmqk.data.tokenizers.files import tokenizers_hash
from mmqk.data.tokens.encode import open_source
from mmqk.data.tokens.folder import layout_of
from mmqk.model import EarlyFusionTransformer
from mmqk.store import OneSentenceParser, UserError, find_file, read_run, run_main

BATCH = 32


@dataclass(frozen=True)
class CaptionGain:
    """Image loss of held-out pairs, in nats per code, averaged first over the images of a caption, then over
    captions.

    Attributes:
        images, captions: Number of images, and number of distinct captions.
        true, shuffled: Loss with the true caption, and loss with the caption of another emoji.
        gain, interval: `shuffled` minus `true`, and the 95 % interval of this gain over captions (Student t).
    """

    images: int
    captions: int
    true: float
    shuffled: float
    gain: float
    interval: tuple[float, float]


def partners(captions: Sequence[Hashable]) -> list[int]:
    """Return, for each caption, the index of a different caption.

    The search begins half a list length after the caption and wraps around at the end of the list. A random
    permutation could give an image its own caption, because several images of one emoji share a caption.

    Raises:
        UserError: all captions are equal.
    """
    n = len(captions)
    indices = []
    for i in range(n):
        others = (j % n for j in range(i + n // 2, i + n // 2 + n))
        other = next((j for j in others if captions[j] != captions[i]), None)
        if other is None:
            raise UserError("The held-out captions are all equal: use data with at least two captions.")
        indices.append(other)
    return indices


@torch.no_grad()
def caption_gain(model: EarlyFusionTransformer, builder: SequenceBuilder) -> CaptionGain:
    """Return the image loss on all held-out pairs, with true captions and with shuffled captions.

    Args:
        model: A model with the vocabulary of `builder`.
        builder: Builder of the validation split.
    """
    pairs = builder.stores["pair"]
    # Compare captions by their token ids.
    captions = [pairs[i][pairs.image_tokens :].tobytes() for i in range(len(pairs))]
    image = model.config.modalities.index("image")

    def image_losses(sources: list[int]) -> Tensor:
        losses = []
        for start in range(0, len(sources), BATCH):
            places = range(start, min(start + BATCH, len(sources)))
            batch = builder.batch([builder.pair(i, image_first=False, caption=sources[i]) for i in places])
            logits_BTV = model(batch.ids_BT, batch.modality_BT)
            nats_BT = torch.nn.functional.cross_entropy(logits_BTV.transpose(1, 2), batch.targets_BT, reduction="none")
            image_BT = (batch.target_modality_BT == image) & batch.target_mask_BT
            losses.append((nats_BT * image_BT).sum(1) / image_BT.sum(1))
        return torch.cat(losses).double()

    return summary(image_losses(list(range(len(captions)))), image_losses(partners(captions)), captions)


def summary(true_N: Tensor, shuffled_N: Tensor, captions: Sequence[Hashable]) -> CaptionGain:
    """Average the losses of N images (nats per code) by caption, then over at least 2 distinct captions."""
    losses = pd.DataFrame({"true": true_N, "shuffled": shuffled_N}, index=list(captions))
    means = losses.groupby(level=0, sort=False).mean()
    gains = means["shuffled"] - means["true"]
    half = float(stats.t.ppf(0.975, len(gains) - 1) * gains.sem())
    true, shuffled, gain = (float(x.mean()) for x in (means["true"], means["shuffled"], gains))
    return CaptionGain(len(captions), len(means), true, shuffled, gain, (gain - half, gain + half))


def main(argv: list[str] | None = None) -> int:
    """Measure the caption gain of a run, and print it as a sentence for reports/tokenizer.

    Raises:
        UserError: the folder is not a run, does not record its data, or its tokenizers have changed.
    """
    from mmqk.checkpoint import load_model

    parser = OneSentenceParser(prog="python -m data.build.caption_gain", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of a finished run")
    run = parser.parse_args(argv).run
    record = read_run(run)
    if record is None:
        raise UserError(f"{run} is not a run folder: name one that mmqk train wrote.")
    try:
        data, trained_on = record["details"]["config"]["data"], record["identity"]["data"]["tokenizers"]
        pairs, tokenizers, cache = (find_file(data[name]) for name in ("pairs", "tokenizers", "cache"))
        seq_len = data["seq_len"]
    except (KeyError, TypeError):
        raise UserError(f"{run / 'run.json'} does not record the data of the run: name a run of mmqk train.") from None
    # Compare the hash, because other tokenizers may have blocks of the same sizes.
    if (present := tokenizers_hash(tokenizers)) != trained_on:
        raise UserError(
            f"The tokenizers of {run} ({trained_on}) differ from those in {tokenizers} ({present}): train it again."
        )
    held_out = open_source("pair", pairs, tokenizers, cache)["val"]
    builder = SequenceBuilder({"pair": held_out}, layout_of(tokenizers), seq_len)
    result = caption_gain(load_model(run), builder)
    low, high = result.interval
    verdict = "gain from" if low > 0 else "gain nothing measurable from"
    print(
        f"Image tokens {verdict} their captions: over {result.images} held-out images with {result.captions} distinct"
        f" captions the loss is {result.true:.3f} nats per code with the true caption and {result.shuffled:.3f} with"
        f" that of another emoji, a difference of {result.gain:.3f} (95 % interval over captions {low:.3f} to"
        f" {high:.3f})."
    )
    return 0


if __name__ == "__main__":
    run_main(main)
