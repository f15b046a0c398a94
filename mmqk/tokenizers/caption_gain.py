"""Do image tokens gain from their captions? ``python -m mmqk.tokenizers.caption_gain --run runs/cpu/<id>``.

The image loss of a trained model on held-out pairs, caption first, with the true caption and with the caption
of another emoji. An image tokenizer whose codes say nothing about content would show no difference.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from mmqk.data.cache import open_cache
from mmqk.data.sequences import SequenceBuilder
from mmqk.data.shards import read_pairs
from mmqk.model import EarlyFusionTransformer
from mmqk.store import UserError, read_json, run_main
from mmqk.tokenizers.vocabulary import JointVocabulary

BATCH = 32


@dataclass(frozen=True)
class CaptionGain:
    """Mean image loss over held-out images, nats a code.

    Attributes:
        images: number of images.
        true, shuffled: with the image's own caption, and with that of another emoji.
        gain: shuffled minus true, and its 95 % interval over images (normal approximation).
    """

    images: int
    true: float
    shuffled: float
    gain: float
    interval: tuple[float, float]


def partners(captions: list[str]) -> list[int]:
    """For each caption the place of another one that differs: the nearest on a circle half a turn away.

    Several drawings of one emoji share a caption, so a random order could pair an image with its own.

    Raises:
        UserError: all captions are the same.
    """
    n = len(captions)
    found = []
    for i in range(n):
        others = (j % n for j in range(i + n // 2, i + n // 2 + n))
        other = next((j for j in others if captions[j] != captions[i]), None)
        if other is None:
            raise UserError("The held-out captions are all the same: there is none to exchange.")
        found.append(other)
    return found


@torch.no_grad()
def caption_gain(model: EarlyFusionTransformer, builder: SequenceBuilder, captions: list[str]) -> CaptionGain:
    """Image loss with true and with exchanged captions, over every held-out pair.

    Args:
        model: trained on the builder's vocabulary.
        builder: of the validation split.
        captions: of that split, in order.
    """

    def image_losses(sources: list[int]) -> torch.Tensor:
        losses = []
        for start in range(0, len(sources), BATCH):
            places = range(start, min(start + BATCH, len(sources)))
            batch = builder.batch([builder.pair(i, image_first=False, caption=sources[i]) for i in places])
            logits_BTV = model(batch.ids_BT, batch.modality_BT)
            nats_BT = torch.nn.functional.cross_entropy(
                logits_BTV.transpose(1, 2), batch.targets_BT, reduction="none"
            )
            image_BT = (batch.target_modality_BT == 1) & batch.target_mask_BT
            losses.append((nats_BT * image_BT).sum(1) / image_BT.sum(1))
        return torch.cat(losses).double()

    true, shuffled = image_losses(list(range(len(captions)))), image_losses(partners(captions))
    difference = shuffled - true
    half = 1.96 * float(difference.std()) / math.sqrt(len(difference))
    gain = float(difference.mean())
    return CaptionGain(
        len(true), float(true.mean()), float(shuffled.mean()), gain, (gain - half, gain + half)
    )


def main(argv: list[str] | None = None) -> int:
    """Measure a run and print the paragraph that reports/tokenizer keeps."""
    from mmqk.training.checkpoint import load_model

    parser = argparse.ArgumentParser(prog="python -m mmqk.tokenizers.caption_gain", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of a finished run")
    run = parser.parse_args(argv).run
    record = read_json(run / "run.json")
    if record is None:
        raise UserError(f"{run} is not a run folder: name one that python -m mmqk.train wrote.")
    data = record["details"]["config"]["data"]
    pairs, text, tokenizers, cache = (Path(data[name]) for name in ("pairs", "text", "tokenizers", "cache"))
    vocabulary = JointVocabulary.load(tokenizers)
    builder = SequenceBuilder(open_cache(pairs, text, tokenizers, cache)["val"], vocabulary, data["seq_len"])
    model = load_model(run)
    if model.config.blocks != vocabulary.blocks:
        raise UserError(f"{run} was trained with other tokenizers than {tokenizers}: train it again.")
    found = caption_gain(model, builder, [pair.caption for pair in read_pairs(pairs, "val")])
    low, high = found.interval
    verdict = "gain from" if low > 0 else "gain nothing measurable from"
    print(
        f"Image tokens {verdict} their captions: over {found.images} held-out images the loss is {found.true:.3f}"
        f" nats a code with the true caption and {found.shuffled:.3f} with that of another emoji, a difference of"
        f" {found.gain:.3f} (95 % interval over images {low:.3f} to {high:.3f})."
    )
    return 0


if __name__ == "__main__":
    run_main(main)
