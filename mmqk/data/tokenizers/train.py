"""Train the text and the image tokenizer on shards: `mmqk data tokenizers`."""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mmqk.data.shards.manifest import SHARE, small_set_sentence
from mmqk.data.tokenizers.files import IMAGE_FILE, TEXT_FILE, ImageTokenizerConfig, TextTokenizer
from mmqk.data.tokenizers.training_data import Images, Source, add_data_arguments, flags_named, selection_of
from mmqk.store import OneSentenceParser, UserError, write_atomic
from mmqk.store.files import writing

if TYPE_CHECKING:
    from mmqk.data.tokenizers.image import ImageTokenizer
    from mmqk.data.tokenizers.train_image import VQTrainingConfig

EPILOG = """\
The text tokenizer is byte-level BPE. It is trained on captions and documents of the train split, half of the
characters from each. The image tokenizer is a vector-quantized autoencoder trained on the images of the train
split. It needs `pip install 'mmqk[vq]'`, and takes about 10 minutes on one CPU core for the shipped images; 256 px
images need a GPU. TensorBoard shows reconstructions, PSNR and code perplexity of the held-out split. Files are
replaced only with --overwrite. New tokenizers need a new token cache, which the next run makes.

--shards takes a folder with a manifest (64 px images and their splits), or tar archives as img2dataset writes
them, with images of any size. A hash of the image decides which samples of tars are held out, as for
`mmqk data tokenize` with the same --val-fraction. --text takes a folder with a manifest, JSON lines with a field
"text" (plain, gzip or xz), or '' for captions only. Put patterns (brace ranges and globs) in quotes. Images and
captions are selected evenly from all shards, always the same ones. Dropped samples are counted by reason.

examples:
  mmqk data tokenizers --overwrite
  mmqk data tokenizers --only image --codes 256 --steps 1000 --out my-tokenizers
  mmqk data tokenizers --shards 'path/{00000..00099}.tar' --text 'web/*.jsonl.gz' --image-size 256 \\
      --grid 16 --codes 8192 --text-size 16384 --out my-tokenizers
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = OneSentenceParser(
        prog="mmqk data tokenizers",
        description="Train the text tokenizer and the image tokenizer of the joint vocabulary.",
        epilog=EPILOG,
    )
    add_data_arguments(p)
    add = p.add_argument
    add("--out", type=Path, default=Path("data/tokenizers"), help="folder of the two files (data/tokenizers)")
    add("--only", choices=("text", "image"), help="train only one tokenizer")
    add("--text-size", type=int, default=1024, help="entries of the text vocabulary (1024)")
    add("--codes", type=int, default=512, help="codes of the image vocabulary (512)")
    add("--image-size", type=int, default=64, help="side of an image in pixels (64)")
    grid = "side of an image's grid of codes: the image size divided by 4, 8, 16 or 32 (8)"
    add("--grid", type=int, default=8, help=grid)
    add("--steps", type=int, default=1200, help="optimizer steps of the image tokenizer (1200)")
    add("--batch-size", type=int, default=32, help="images per step (32)")
    add("--seed", type=int, default=0, help="seed of the image tokenizer's weights and batches (0)")
    add("--threads", type=int, default=1, help="CPU threads; their number changes rounding (1)")
    add("--log-dir", type=Path, default=Path("runs/tokenizer"), help="TensorBoard events (runs/tokenizer)")
    add("--overwrite", action="store_true", help="replace existing tokenizer files in --out")
    return p


def main(argv: list[str] | None = None) -> int:
    """Train the tokenizers and write them to `--out`."""
    args = parser().parse_args(argv)
    wanted = [args.only] if args.only else ["text", "image"]
    config = _image_config(args)
    _check(args, wanted, config)
    selection = selection_of(args)
    source, documents = Source(args.shards, selection), Source(args.text, selection)
    # Read the images first: images that cannot be used must be an error before the text tokenizer is trained.
    images = None
    if "image" in wanted:
        images, config = _images(source, args, config)
    if "text" in wanted:
        both = " and ".join(name for name in (source.name, documents.name) if name)
        print(f"text: training {args.text_size} entries on {both}", flush=True)
        text = train_text(source, documents, args.text_size)
        if text.size < args.text_size:
            print(f"text: the texts give {text.size} entries, not {args.text_size}: the vocabulary has {text.size}")
        _write(args.out / TEXT_FILE, text.to_json().encode())
    if images is not None:
        image = train_image(images, config, args)
        _write(args.out / IMAGE_FILE, image.to_bytes())
    return 0


def train_text(source: Source, documents: Source, size: int) -> TextTokenizer:
    """Train BPE on the captions and documents of a train split, half of the characters from each.

    The smaller part, usually the captions, is repeated, so that the words of captions get entries.

    Raises:
        UserError: shards or documents are missing or damaged.
    """
    (captions, read_captions), (texts, read_texts) = source.captions(), documents.documents()
    for part, summary in (("captions", read_captions), ("documents", read_texts)):
        if summary:
            print(f"text: {part}: {summary}", flush=True)
    ratio = sum(map(len, texts)) / max(1, sum(map(len, captions)))
    repeats = round(1 / ratio) if ratio else 1
    return TextTokenizer.train([*(captions * max(1, round(ratio))), *(texts * max(1, repeats))], size)


def train_image(images: Images, config: ImageTokenizerConfig, args: argparse.Namespace) -> ImageTokenizer:
    """Train the image tokenizer with the settings of the command line.

    Raises:
        UserError: the extra `[vq]` is not installed.
    """
    # Lightning takes seconds to import, and the text tokenizer does not need it.
    import torch
    from lightning.pytorch.loggers import TensorBoardLogger

    from mmqk.data.tokenizers.train_image import train_image_tokenizer

    # Hide log lines on hardware, advertisements, and warnings that `_images` prints in its own words. Errors are
    # still shown.
    for name in ("lightning.pytorch", "vector_quantize_pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*(does not have many workers|LeafSpec|logging interval).*")
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        train, val = images.train_BCHW, images.val_BCHW
        counts = f"{len(train)} images, {len(val)} held out"
        print(f"image: {args.steps} steps on {counts}; TensorBoard files in {args.log_dir}", flush=True)
        return train_image_tokenizer(
            train,
            val,
            config,
            _training_config(args, config),
            accelerator="auto",
            devices=1,
            logger=TensorBoardLogger(args.log_dir, name=None),
            val_check_interval=max(1, args.steps // 20),
            enable_progress_bar=False,
        )
    finally:
        torch.set_num_threads(threads)


def _images(
    source: Source, args: argparse.Namespace, config: ImageTokenizerConfig
) -> tuple[Images, ImageTokenizerConfig]:
    """Return the images of both splits, and the configuration with at most as many codes as there are training vectors.

    Raises:
        UserError: the shards are missing or damaged.
    """
    images = source.images(config.image_size)
    train, val = images.train_BCHW, images.val_BCHW
    if source.folder is None and args.val_fraction is None and source.val_fraction > SHARE:
        print(f"image: {small_set_sentence(source.val_fraction)}", flush=True)
    if images.summary:
        print(f"image: {images.summary}, {(train.nbytes + val.nbytes) / 1e9:.2f} GB in memory", flush=True)
    most = len(train) * config.grid**2
    if config.codes > most:
        print(
            f"image: {len(train):,} training images of {config.grid}x{config.grid} codes cannot fill more codes:"
            f" the codebook has {most:,}, not {config.codes:,}",
            flush=True,
        )
        with flags_named():
            config = replace(config, codes=most)
    return images, config


def _check(args: argparse.Namespace, wanted: list[str], config: ImageTokenizerConfig) -> None:
    if args.threads < 1:
        raise UserError(f"--threads is {args.threads}: give 1 or more.")
    for kind in wanted:
        path = args.out / {"text": TEXT_FILE, "image": IMAGE_FILE}[kind]
        if path.exists() and not args.overwrite:
            raise UserError(f"{path} exists: give --overwrite to replace it or another --out.")
    if "image" in wanted:
        from mmqk.data.tokenizers.train_image import quantizer_class

        quantizer_class()
        _training_config(args, config)
    with writing(args.out, "give another --out."):
        args.out.mkdir(parents=True, exist_ok=True)
        if not os.access(args.out, os.W_OK):
            raise PermissionError(13, "permission denied")


def _image_config(args: argparse.Namespace) -> ImageTokenizerConfig:
    try:
        config = ImageTokenizerConfig(image_size=args.image_size, grid=args.grid, codes=args.codes)
        # This gives 40 channels before the last layer for every stride; a width of 160 would give 10 for stride 32.
        return replace(config, decoder_width=20 * config.stride)
    except ValueError as error:
        raise UserError(f"The image tokenizer cannot have this shape: {str(error).rstrip('.')}.") from error


def _training_config(args: argparse.Namespace, config: ImageTokenizerConfig) -> VQTrainingConfig:
    from mmqk.data.tokenizers.train_image import VQTrainingConfig

    # A code describes a square of the image. Random shifts of up to half the side of a square move each outline to
    # every position within its square.
    with flags_named():
        return VQTrainingConfig(args.steps, args.batch_size, shift=config.stride // 2, seed=args.seed)


def _write(path: Path, content: bytes) -> None:
    with writing(path, "give another --out."):
        write_atomic(path, content)
    print(f"wrote {path} ({len(content) / 1e6:.2f} MB)", flush=True)
