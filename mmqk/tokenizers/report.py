"""Measure the tokenizers and write their page: `python -m mmqk.tokenizers.report`."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from mmqk.data.shards import manifest_hash, read_pairs, read_text
from mmqk.store import OneSentenceParser, UserError, run_main
from mmqk.tokenizers.files import tokenizers_hash
from mmqk.tokenizers.image import ImageTokenizer
from mmqk.tokenizers.measure import TokenStatistics, psnr, token_statistics
from mmqk.tokenizers.text import TextTokenizer
from mmqk.tokenizers.train import add_data_arguments, read_images

COMMAND = "python -m mmqk.tokenizers.report"
SHEET = "held-out.png"
COLUMNS, ROWS, ZOOM = 12, 3, 2
KEPT_BELOW = "<!-- What stands below this line is kept when the page is made again. -->"


@dataclass(frozen=True)
class Measures:
    """What the page says.

    Attributes:
        images: number of images by split.
        psnr_db: mean PSNR over the images of each split, dB.
        psnr_shuffled: the same on held-out images after the codebook's rows were permuted.
        psnr_pooled: the same for average pooling to the grid and bilinear interpolation, without any codes.
        codes: statistics of image codes by split.
        captions, documents: statistics of text tokens of the train split.
        caption_tokens: tokens of a caption, mean over the train split.
        caption_chars, document_chars: characters a token, train split.
    """

    images: dict[str, int]
    psnr_db: dict[str, float]
    psnr_shuffled: float
    psnr_pooled: float
    codes: dict[str, TokenStatistics]
    captions: TokenStatistics
    documents: TokenStatistics
    caption_tokens: float
    caption_chars: float
    document_chars: float


def reconstruct(tokenizer: ImageTokenizer, images_BCHW: Tensor, batch: int = 256) -> tuple[Tensor, Tensor]:
    """Codes (B, N) and reconstructions of uint8 images."""
    codes = [tokenizer.encode(chunk.float() / 255) for chunk in images_BCHW.split(batch)]
    return torch.cat(codes), torch.cat([tokenizer.decode(chunk) for chunk in codes])


def measure(shards: Path, text: Path, tokenizers: Path) -> Measures:
    """Tokenize both splits and count.

    Raises:
        UserError: a shard, document file or tokenizer file is missing or damaged.
    """
    words, pictures = TextTokenizer.load(tokenizers), ImageTokenizer.load(tokenizers)
    images, quality, counts = {}, {}, {}
    for split in ("train", "val"):
        pixels = read_images(shards, split, pictures.image_size)
        codes, again = reconstruct(pictures, pixels)
        images[split] = len(pixels)
        quality[split] = float(psnr(pixels.float() / 255, again).mean())
        counts[split] = token_statistics(codes, pictures.size)
    held_out = pixels.float() / 255
    order = torch.randperm(pictures.size, generator=torch.Generator().manual_seed(0))
    colours = F.adaptive_avg_pool2d(held_out, pictures.grid)
    pooled = F.interpolate(colours, held_out.shape[-2:], mode="bilinear")

    captions = [pair.caption for pair in read_pairs(shards, "train")]
    documents = list(read_text(text, "train"))
    caption_ids = [i for caption in captions for i in words.encode(caption)]
    document_ids = [i for document in documents for i in words.encode(document)]
    return Measures(
        images=images,
        psnr_db=quality,
        psnr_shuffled=float(psnr(held_out, pictures.decode(order[codes])).mean()),
        psnr_pooled=float(psnr(held_out, pooled).mean()),
        codes=counts,
        captions=token_statistics(torch.tensor(caption_ids), words.size),
        documents=token_statistics(torch.tensor(document_ids), words.size),
        caption_tokens=len(caption_ids) / len(captions),
        caption_chars=sum(map(len, captions)) / len(caption_ids),
        document_chars=sum(map(len, documents)) / len(document_ids),
    )


def contact_sheet(shards: Path, tokenizers: Path) -> Image.Image:
    """Held-out originals, each above its reconstruction, evenly spread over the split."""
    pictures = ImageTokenizer.load(tokenizers)
    pixels = read_images(shards, "val", pictures.image_size)
    n = min(COLUMNS * ROWS, len(pixels))
    pixels = pixels[torch.linspace(0, len(pixels) - 1, n).round().long()]
    _, again = reconstruct(pictures, pixels)
    side, gap = pictures.image_size * ZOOM, 4
    rows = -(-n // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * (side + gap) + gap, rows * (2 * side + 4 * gap) + gap), "#d9d9d9")
    draw = ImageDraw.Draw(sheet)
    for i in range(n):
        left, top = gap + i % COLUMNS * (side + gap), gap + i // COLUMNS * (2 * side + 4 * gap)
        for image, y in ((pixels[i], top), (again[i], top + side + gap)):
            sheet.paste(to_pil_image(image).resize((side, side), Image.Resampling.LANCZOS), (left, y))
        draw.rectangle((left, top, left + side - 1, top + 2 * side + gap - 1), outline="#b0b0b0")
    return sheet


def page(m: Measures, args: argparse.Namespace) -> str:
    """The page as Markdown."""
    pictures, words = ImageTokenizer.load(args.tokenizers), TextTokenizer.load(args.tokenizers)
    lines = "\n".join
    n, codes = pictures.config.grid**2, m.codes
    row = "| {} | {} | {} | {:.2f} | {:.2f} | {:.0f} |".format
    unigram = [
        row(name, f"{s.tokens:,}", f"{s.used} of {size}", s.entropy, s.bits, s.perplexity)
        for name, s, size in (
            ("image codes", codes["train"], pictures.size),
            ("captions", m.captions, words.size),
            ("documents", m.documents, words.size),
        )
    ]
    table = [
        ("train", m.images["train"], m.psnr_db["train"], codes["train"]),
        ("held out", m.images["val"], m.psnr_db["val"], codes["val"]),
        ("held out, codebook permuted (control)", m.images["val"], m.psnr_shuffled, None),
        (f"held out, {n} mean colours interpolated, no codes", m.images["val"], m.psnr_pooled, None),
    ]
    quality = [
        f"| {name} | {count:,} | {db:.2f} | {s.used if s else ''} | {f'{s.perplexity:.0f}' if s else ''} |"
        for name, count, db, s in table
    ]
    bits = n * math.log2(pictures.size)
    return f"""\
# The tokenizers: {words.size} text entries, {pictures.size} image codes

Held-out images come back at {m.psnr_db["val"]:.1f} dB from {n} codes each, and the codes are spread over
{codes["val"].perplexity:.0f} effective entries of {pictures.size}. The shipped images are icons on a white
ground, not photographs; their held-out split shares no emoji with the train split, whoever drew it.

![held-out originals, each above its reconstruction]({SHEET})

*Held-out originals, each above its reconstruction from {n} codes.*

Every number and the sheet: `{COMMAND}` (data {manifest_hash(args.shards)} and {manifest_hash(args.text)},
tokenizers {tokenizers_hash(args.tokenizers)}). The tokenizers: `python -m mmqk.tokenizers.train --overwrite`.

## Reconstruction

| images | number | PSNR, dB | codes used | code perplexity |
| --- | --- | --- | --- | --- |
{lines(quality)}

PSNR is the mean over images of 10 log10(1 / mean squared error), pixels in [0, 1]. {n} codes of
{pictures.size} are {bits:.0f} bits an image; {n} mean colours at 8 bits a channel are {n * 24}.

## Unigram entropy by modality, train split

| tokens | number | entries used | entropy, nats | entropy, bits | perplexity |
| --- | --- | --- | --- | --- | --- |
{lines(unigram)}

These are entropies of token counts, without context: the loss of a predictor that knows only how often each
token occurs. They say nothing about how predictable a modality is within a sequence.

## Text

A caption has {m.caption_tokens:.1f} tokens on average; a token is {m.caption_chars:.2f} characters of a
caption and {m.document_chars:.2f} characters of a document (train split).
"""


def main(argv: list[str] | None = None) -> int:
    """Measure, draw, write README.md and the contact sheet."""
    p = OneSentenceParser(prog="python -m mmqk.tokenizers.report", description=__doc__)
    add_data_arguments(p)
    tokenizers, out = Path("data/tokenizers"), Path("reports/tokenizer")
    p.add_argument("--tokenizers", type=Path, default=tokenizers, help="what to measure (data/tokenizers)")
    p.add_argument("--out", type=Path, default=out, help="folder of the page (reports/tokenizer)")
    args = p.parse_args(argv)
    text = page(measure(args.shards, args.text, args.tokenizers), args)
    sheet = contact_sheet(args.shards, args.tokenizers)
    readme = args.out / "README.md"
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        before = readme.read_text(encoding="utf-8") if readme.exists() else ""
        kept = before.partition(KEPT_BELOW)[2]
        # 128 colours are enough for a page and keep the file small
        sheet.quantize(128).save(args.out / SHEET, optimize=True)
        readme.write_text(f"{text}\n{KEPT_BELOW}\n{kept.lstrip()}", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{args.out} cannot be written ({error.strerror}): give another --out.") from error
    print(f"wrote {readme} and {args.out / SHEET}")
    return 0


if __name__ == "__main__":
    run_main(main)
