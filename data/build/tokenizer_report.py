"""Measure the tokenizers and write their page: `python -m data.build.tokenizer_report`."""

from __future__ import annotations

import argparse
import io
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from mmqk.data.shards.manifest import load_manifest, manifest_hash
from mmqk.data.tokenizers import train
from mmqk.data.tokenizers.files import TRAIN_COMMAND, ImageTokenizerConfig, TextTokenizer, read_config, tokenizers_hash
from mmqk.data.tokenizers.image import ImageTokenizer
from mmqk.data.tokenizers.train_image import psnr
from mmqk.data.tokenizers.training_data import Images, Source, add_data_arguments, selection_of
from mmqk.store import OneSentenceParser, find_file, identity_hash, relative_word, run_main, without_roots, write_folder
from mmqk.store.files import writing

COMMAND = "python -m data.build.tokenizer_report"
SHEET = "held-out.png"
SHIPPED = "emoji"  # name in the manifest of the shipped images
# Layout of the contact sheet: number of rows, then (in pixels) width of the sheet, side of an image, and gap between
# images.
ROWS, WIDTH, SIDE, GAP = 3, 1600, 128, 4
KEPT_BELOW = "<!-- The command keeps the text below this line. -->"


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
        return math.exp(self.entropy)

    @property
    def bits(self) -> float:
        """The entropy in bits."""
        return self.entropy / math.log(2)


def token_statistics(ids: Tensor, size: int) -> TokenStatistics:
    """Return the statistics of a tensor of ids from 0 to size - 1, of any shape."""
    counts = torch.bincount(ids.flatten(), minlength=size).double()
    p = counts[counts > 0] / counts.sum()
    return TokenStatistics(int(counts.sum()), len(p), float(-(p * p.log()).sum()))


@dataclass(frozen=True)
class Measures:
    """The numbers of the page.

    Attributes:
        images: number of images by split.
        psnr_db: mean PSNR over the images of each split, dB.
        psnr_permuted: held-out PSNR after permuting the rows of the codebook.
        psnr_pooled: held-out PSNR of average pooling to the grid and bilinear interpolation, without codes.
        codes: statistics of image codes by split.
        captions, documents: statistics of text tokens of the train split.
        caption_tokens: mean tokens per caption of the train split.
        caption_chars, document_chars: characters per token of the train split; 0 without documents.
    """

    images: dict[str, int]
    psnr_db: dict[str, float]
    psnr_permuted: float
    psnr_pooled: float
    codes: dict[str, TokenStatistics]
    captions: TokenStatistics
    documents: TokenStatistics
    caption_tokens: float
    caption_chars: float
    document_chars: float


def reconstruct(tokenizer: ImageTokenizer, images_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes (B, N) and reconstructions of uint8 images."""
    codes_BN = tokenizer.encode(images_BCHW.float() / 255)
    return codes_BN, tokenizer.decode(codes_BN)


def measure(images: Images, captions: list[str], documents: list[str], tokenizers: Path) -> Measures:
    """Tokenize both splits, the images in chunks, and return the numbers of the page.

    Raises:
        UserError: a tokenizer file is missing or damaged.
    """
    text, image = TextTokenizer.load(tokenizers), ImageTokenizer.load(tokenizers)
    order = torch.randperm(image.size, generator=torch.Generator().manual_seed(0))
    quality: dict[str, float] = {}
    counts: dict[str, TokenStatistics] = {}
    for split, pixels in (("train", images.train_BCHW), ("val", images.val_BCHW)):
        db, codes, permuted, pooled = [], [], [], []
        for chunk in pixels.split(image.config.images_at_once):
            original = chunk.float() / 255
            chunk_codes, reconstruction = reconstruct(image, chunk)
            db.append(psnr(original, reconstruction))
            codes.append(chunk_codes)
            if split == "val":
                colors = F.adaptive_avg_pool2d(original, image.grid)
                smooth = F.interpolate(colors, original.shape[-2:], mode="bilinear")
                permuted.append(psnr(original, image.decode(order[chunk_codes])))
                pooled.append(psnr(original, smooth))
        quality[split] = float(torch.cat(db).mean())
        counts[split] = token_statistics(torch.cat(codes), image.size)

    caption_ids = [i for caption in captions for i in text.encode(caption)]
    document_ids = [i for document in documents for i in text.encode(document)]
    return Measures(
        images={"train": len(images.train_BCHW), "val": len(images.val_BCHW)},
        psnr_db=quality,
        psnr_permuted=float(torch.cat(permuted).mean()),
        psnr_pooled=float(torch.cat(pooled).mean()),
        codes=counts,
        captions=token_statistics(torch.tensor(caption_ids), text.size),
        documents=token_statistics(torch.tensor(document_ids).long(), text.size),
        caption_tokens=len(caption_ids) / len(captions),
        caption_chars=sum(map(len, captions)) / len(caption_ids),
        document_chars=sum(map(len, documents)) / max(1, len(document_ids)),
    )


def contact_sheet(held_out_BCHW: Tensor, tokenizers: Path) -> Image.Image:
    """Return an image of held-out originals, evenly spread over the split, each above its reconstruction."""
    tokenizer = ImageTokenizer.load(tokenizers)
    side = tokenizer.image_size * max(1, SIDE // tokenizer.image_size)
    columns = max(3, WIDTH // (side + GAP))
    n = min(columns * ROWS, len(held_out_BCHW))
    pixels = held_out_BCHW[torch.linspace(0, len(held_out_BCHW) - 1, n).round().long()]
    chunks = pixels.split(tokenizer.config.images_at_once)
    reconstructions = torch.cat([reconstruct(tokenizer, chunk)[1] for chunk in chunks])
    rows = -(-n // columns)
    sheet = Image.new("RGB", (columns * (side + GAP) + GAP, rows * (2 * side + 4 * GAP) + GAP), "#d9d9d9")
    draw = ImageDraw.Draw(sheet)
    for i in range(n):
        left, top = GAP + i % columns * (side + GAP), GAP + i // columns * (2 * side + 4 * GAP)
        for image, y in ((pixels[i], top), (reconstructions[i], top + side + GAP)):
            sheet.paste(to_pil_image(image).resize((side, side), Image.Resampling.LANCZOS), (left, y))
        draw.rectangle((left, top, left + side - 1, top + 2 * side + GAP - 1), outline="#b0b0b0")
    return sheet


def page(m: Measures, args: argparse.Namespace, source: Source, documents: Source, read: list[str]) -> str:
    """Return the page as Markdown. `read` has sentences about how many images, captions and documents were read."""
    image, words = ImageTokenizer.load(args.tokenizers), TextTokenizer.load(args.tokenizers)
    lines = "\n".join
    n, codes = image.config.grid**2, m.codes
    unigram = [
        f"| {name} | {s.tokens:,} | {s.used} of {size} | {s.entropy:.2f} | {s.bits:.2f} | {s.perplexity:.0f} |"
        for name, s, size in (
            ("image codes", codes["train"], image.size),
            ("captions", m.captions, words.size),
            ("documents", m.documents, words.size),
        )
        if s.tokens
    ]
    bits = n * math.log2(image.size)
    text = f"""\
# The tokenizers: {words.size} text entries, {image.size} image codes

The PSNR of held-out images is {m.psnr_db["val"]:.1f} dB with {n} codes each. The code perplexity is
{codes["val"].perplexity:.0f} of {image.size} codes. {_about(source)}

![held-out originals, each above its reconstruction]({SHEET})

*Held-out originals, each above its reconstruction from {n} codes.*

Command for this page: `{COMMAND}{_flags(args)}` (data {_hashes(source, documents)},
tokenizers {tokenizers_hash(args.tokenizers)}). Command for the tokenizers:
{_training(args, image.config, words.size)}.

## Reconstruction

| images | number | PSNR, dB | codes used | code perplexity |
| --- | --- | --- | --- | --- |
{lines(_reconstruction_rows(m, n))}

PSNR is the mean over images of 10 log10(1 / mean squared error), pixels in [0, 1]. {n} codes with
{image.size} possible values take {bits:.0f} bits per image; {n} mean colors at 8 bits per channel take {n * 24}.

## Unigram entropy by modality, train split

| tokens | number | entries used | entropy, nats | entropy, bits | perplexity |
| --- | --- | --- | --- | --- | --- |
{lines(unigram)}

These are entropies of token counts, without context: the loss of a model that knows token
frequencies only. They do not measure how predictable a modality is within a sequence.

## Text

A caption has {m.caption_tokens:.1f} tokens on average. Characters per token (train split): {m.caption_chars:.2f} in
captions{f", {m.document_chars:.2f} in documents" if m.documents.tokens else ""}.
"""
    return text + "".join(f"\nNumber of {part}.\n" for part in read)


def _reconstruction_rows(m: Measures, n: int) -> list[str]:
    """Return the rows of the table of reconstructions from n codes, with two controls."""
    table = [
        ("train", m.images["train"], m.psnr_db["train"], m.codes["train"]),
        ("held out", m.images["val"], m.psnr_db["val"], m.codes["val"]),
        ("held out, codebook permuted (control)", m.images["val"], m.psnr_permuted, None),
        (f"held out, {n} mean colors interpolated, no codes", m.images["val"], m.psnr_pooled, None),
    ]
    return [
        f"| {name} | {count:,} | {db:.2f} | {s.used if s else ''} | {f'{s.perplexity:.0f}' if s else ''} |"
        for name, count, db, s in table
    ]


def _about(source: Source) -> str:
    if source.folder is not None:
        if load_manifest(source.folder).about.get("name") != SHIPPED:
            return f"The\nsplits are those of {source.name}."
        return (
            "The shipped images are icons on a white\nbackground, not photographs. All images of an emoji, of all"
            " vendors, are in one split."
        )
    share = f"{source.val_fraction:.4g}"
    return f"A share of\n{share} is held out by a hash of the image file, so copies are in one split."


def _flags(args: argparse.Namespace) -> str:
    """Return the flags of this command line that differ from the defaults."""
    flags = _differing(parser(), {name: value for name, value in vars(args).items() if name != "out"})
    return " " + shlex.join(flags) if flags else ""


def _training(args: argparse.Namespace, c: ImageTokenizerConfig, text_size: int) -> str:
    """Return the command that trains tokenizers of this shape on this data."""
    shape = {"codes": c.codes, "image_size": c.image_size, "grid": c.grid}
    flags = _differing(train.parser(), vars(args) | shape | {"text_size": text_size, "out": args.tokenizers})
    others = "; add the --steps, --batch-size and --seed with which these tokenizers were trained" if flags else ""
    return f"`{TRAIN_COMMAND} {shlex.join([*flags, '--overwrite'])}`{others}"


def _differing(p: argparse.ArgumentParser, given: dict[str, Any]) -> list[str]:
    """Return the flags of `p` whose values in `given` differ from their defaults."""
    flags = []
    for name, default in vars(p.parse_args([])).items():
        if name in given and given[name] != default:
            values = given[name] if isinstance(given[name], list) else [given[name]]
            flags += [f"--{name.replace('_', '-')}", *(relative_word(str(value)) for value in values)]
    return flags


def _hashes(source: Source, documents: Source) -> str:
    """Return the hash of each manifest, or of the names and sizes of the files."""
    files = [[path.name, path.stat().st_size] for path in documents.paths]
    text = manifest_hash(documents.folder) if documents.folder else identity_hash({"files": files}) if files else ""
    if source.folder:
        return " and ".join(i for i in (manifest_hash(source.folder), text) if i)
    shards = [[i.path.name, i.path.stat().st_size, len(i)] for i in source.indexes[""]]
    return " and ".join(i for i in (identity_hash({"shards": shards}), text) if i)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = OneSentenceParser(
        prog=COMMAND,
        description="Measure tokenizers and write their page. Give the data and --val-fraction of\nthe training.",
    )
    add_data_arguments(p)
    tokenizers, out = find_file("data/tokenizers"), Path("reports/tokenizer")
    p.add_argument("--tokenizers", type=Path, default=tokenizers, help="folder of the tokenizers (data/tokenizers)")
    p.add_argument("--out", type=Path, default=out, help="folder of the page (reports/tokenizer)")
    return p


def main(argv: list[str] | None = None) -> int:
    """Measure the tokenizers, and write README.md and the contact sheet."""
    args = parser().parse_args(argv)
    selection = selection_of(args)
    source, documents = Source(args.shards, selection), Source(args.text, selection)
    images = source.images(read_config(args.tokenizers).image_size)
    (captions, read_captions), (texts, read_texts) = source.captions(), documents.documents()
    summaries = {"images": images.summary, "captions": read_captions, "documents": read_texts}
    measures = measure(images, captions, texts, args.tokenizers)
    read = [f"{part}: {summary}" for part, summary in summaries.items() if summary]
    text = page(measures, args, source, documents, read)
    sheet = contact_sheet(images.val_BCHW, args.tokenizers)
    readme = args.out / "README.md"
    with writing(args.out, "give another --out."):
        kept = readme.read_text(encoding="utf-8").partition(KEPT_BELOW)[2] if readme.exists() else ""
        png = io.BytesIO()
        sheet.quantize(128).save(png, "PNG", optimize=True)  # 128 colors keep the file small
        files: dict[str, bytes | str] = {SHEET: png.getvalue()}
        files[readme.name] = f"{without_roots(text)}\n{KEPT_BELOW}\n\n{kept.lstrip()}"
        write_folder(args.out, files)
    print(f"wrote {readme} and {args.out / SHEET}")
    return 0


if __name__ == "__main__":
    run_main(main)
