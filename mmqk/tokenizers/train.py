"""Train the text and the image tokenizer on shards: `python -m mmqk.tokenizers.train`."""

from __future__ import annotations

import argparse
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

from mmqk.data.shards import read_pairs, read_text
from mmqk.store import OneSentenceParser, UserError, clock, run_main, write_atomic
from mmqk.tokenizers.files import IMAGE_FILE, TEXT_FILE
from mmqk.tokenizers.image import ImageTokenizer, ImageTokenizerConfig
from mmqk.tokenizers.text import TextTokenizer

EPILOG = """\
The text tokenizer is byte-level BPE, learnt from the captions and the documents of the train split, half of
the characters from each. The image tokenizer is a vector-quantised autoencoder trained on the images of the
train split; it needs `pip install 'mmqk[vq]'` and about 10 minutes on one CPU core, and logs reconstructions,
PSNR and code perplexity of the held-out split to TensorBoard. Nothing is overwritten without --overwrite, and
token caches made with other tokenizers are not used again.

examples:
  python -m mmqk.tokenizers.train --overwrite
  python -m mmqk.tokenizers.train --only image --codes 256 --steps 1000 --out my-tokenizers
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = OneSentenceParser(
        prog="python -m mmqk.tokenizers.train",
        description="Train the tokenizers that place text and images in one vocabulary.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_data_arguments(p)
    out, log_dir = Path("data/tokenizers"), Path("runs/tokenizer")
    p.add_argument("--out", type=Path, default=out, help="folder of the two files (data/tokenizers)")
    p.add_argument("--only", choices=("text", "image"), help="train one of the two")
    p.add_argument("--text-size", type=int, default=1024, help="entries of the text vocabulary (1024)")
    p.add_argument("--codes", type=int, default=512, help="codes of the image vocabulary (512)")
    p.add_argument("--grid", type=int, default=8, help="side of an image's grid of codes: 2, 4, 8 or 16 (8)")
    p.add_argument("--steps", type=int, default=1200, help="optimizer steps of the image tokenizer (1200)")
    p.add_argument("--seed", type=int, default=0, help="of the image tokenizer's weights and batches (0)")
    p.add_argument("--threads", type=int, default=1, help="CPU threads; more round differently (1)")
    p.add_argument("--log-dir", type=Path, default=log_dir, help="TensorBoard events (runs/tokenizer)")
    p.add_argument("--overwrite", action="store_true", help="replace tokenizer files that exist in --out")
    return p


def add_data_arguments(p: argparse.ArgumentParser) -> None:
    """`--shards` and `--text`."""
    p.add_argument("--shards", type=Path, default=Path("data/emoji"), help="shards of pairs (data/emoji)")
    p.add_argument("--text", type=Path, default=Path("data/text"), help="text documents (data/text)")


def main(argv: list[str] | None = None) -> int:
    """Train what is asked for and write it to `--out`."""
    args = parser().parse_args(argv)
    wanted = [args.only] if args.only else ["text", "image"]
    _check(args, wanted)
    if "text" in wanted:
        print(f"text: learning {args.text_size} entries from {args.shards} and {args.text}", flush=True)
        text = train_text(args.shards, args.text, args.text_size)
        _write(args.out / TEXT_FILE, text.to_json().encode())
    if "image" in wanted:
        image = train_image(args)
        _write(args.out / IMAGE_FILE, image.to_bytes())
    return 0


def train_text(shards: Path, text: Path, size: int) -> TextTokenizer:
    """BPE of a train split's captions and documents, half of the characters from each.

    The captions are the smaller part and are repeated, so that the words of images get entries of their own.

    Raises:
        UserError: shards or documents are missing or damaged, or too few for `size` entries.
    """
    captions = [pair.caption for pair in read_pairs(shards, "train")]
    documents = list(read_text(text, "train"))
    ratio = sum(map(len, documents)) / max(1, sum(map(len, captions)))
    return TextTokenizer.train([*(captions * max(1, round(ratio))), *documents], size)


def train_image(args: argparse.Namespace) -> ImageTokenizer:
    """Train the image tokenizer as the command line says.

    Raises:
        UserError: the shards are missing or damaged, or the extra `[vq]` is not installed.
    """
    # Lightning and timm take seconds to import: only this part needs them.
    import torch
    from lightning.pytorch.loggers import TensorBoardLogger

    from mmqk.tokenizers.vq import VQTrainingConfig, train_image_tokenizer

    config = _image_config(args)
    _quiet()
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        train, val = (read_images(args.shards, split, config.image_size) for split in ("train", "val"))
        print(
            f"image: {args.steps} steps on {len(train)} images, {len(val)} held out; see {args.log_dir}",
            flush=True,
        )
        return train_image_tokenizer(
            train,
            val,
            config,
            VQTrainingConfig(steps=args.steps, seed=args.seed),
            accelerator="auto",
            devices=1,
            logger=TensorBoardLogger(args.log_dir, name=None),
            val_check_interval=max(1, args.steps // 20),
            enable_progress_bar=False,
            callbacks=[_progress(args.steps)],
        )
    finally:
        torch.set_num_threads(threads)


def read_images(shards: Path, split: str, size: int) -> Any:
    """All images of a split as one uint8 tensor (B, 3, size, size).

    Raises:
        UserError: the split is empty, or an image has another size.
    """
    import torch
    from torchvision.transforms.functional import pil_to_tensor

    images = []
    for pair in read_pairs(shards, split):
        if pair.image.size != (size, size):
            raise UserError(f"Sample {pair.key} of {shards} is {pair.image.size}, not {size} px: resize it.")
        images.append(pil_to_tensor(pair.image))
    if not images:
        raise UserError(f"The {split} split of {shards} has no pairs: run `python -m mmqk.data.build`.")
    return torch.stack(images)


def _check(args: argparse.Namespace, wanted: list[str]) -> None:
    for name in ("steps", "threads"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} is {getattr(args, name)}: give 1 or more.")
    _image_config(args)
    for kind in wanted:
        path = args.out / {"text": TEXT_FILE, "image": IMAGE_FILE}[kind]
        if path.exists() and not args.overwrite:
            raise UserError(f"{path} exists: give --overwrite to replace it or another --out.")
    if "image" in wanted:
        from mmqk.tokenizers.vq import quantizer_class

        quantizer_class()
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        writable = os.access(args.out, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise UserError(f"The folder {args.out} cannot be written: give another --out.")


def _image_config(args: argparse.Namespace) -> ImageTokenizerConfig:
    try:
        return ImageTokenizerConfig(grid=args.grid, codes=args.codes)
    except ValueError as error:
        raise UserError(f"The image tokenizer cannot have this shape: {error}.") from error


def _write(path: Path, content: bytes) -> None:
    try:
        write_atomic(path, content)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): give another --out.") from error
    print(f"wrote {path} ({len(content) / 1e6:.2f} MB)", flush=True)


def _progress(steps: int) -> Any:
    import lightning as L

    class Progress(L.Callback):
        """One line at each look at the held-out images, with the time left."""

        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.started = time.monotonic()

        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            done, values = trainer.global_step, trainer.callback_metrics
            left = (time.monotonic() - self.started) / max(1, done) * (steps - done)
            print(
                f"image: step {done}/{steps} · held out: PSNR {values['val/psnr']:.2f} dB, perplexity"
                f" {values['val/perplexity']:.0f}, {values['val/codes_used']:.0f} codes used"
                f" · about {clock(left)} left",
                flush=True,
            )

    return Progress()


def _quiet() -> None:
    # Hardware lines and advertisements; errors still show.
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.accelerators.cuda"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*(does not have many workers|LeafSpec|logging interval).*")


if __name__ == "__main__":
    run_main(main)
