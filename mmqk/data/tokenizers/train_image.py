"""Train the image tokenizer with a Lightning module.

The quantizer comes from vector-quantize-pytorch (the extra `[vq]`). Its codebook is an exponential moving average
(van den Oord et al., 1711.00937, appendix A) that starts from k-means on the first batch. Unused codes are replaced
by vectors of the batch.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torchvision.utils import make_grid

from mmqk.data.tokenizers.files import ImageTokenizerConfig
from mmqk.data.tokenizers.image import ImageTokenizer
from mmqk.model.ranges import MOST_SEED, MOST_STEPS, check_fields, number
from mmqk.store import UserError

LR = 3e-3  # peak learning rate of AdamW; one cycle with 5 % warm-up
DECAY = 0.97  # of the moving averages of the codebook, per step
# A code with a moving count below this is replaced by a vector of the batch. The second bound is a share of the mean
# count (vectors in a batch / codes); the lower of the two applies. With the first alone, every code of a large codebook
# could be replaced at every step: if 8,192 codes are used equally often in batches of 8,192 vectors, each has a count
# of 1.
DEAD_BELOW, DEAD_SHARE = 2.0, 0.5
# Weights of the commitment loss, of the L1 loss on differences of neighboring pixels, which keeps outlines sharp, and
# of the squared error, which are added to the L1 loss.
COMMITMENT, EDGE, SQUARED = 0.25, 0.5, 2.0
SHOWN_IMAGES = 12
LOG_EVERY = 50


@dataclass(frozen=True)
class VQTrainingConfig:
    """The training settings of an image tokenizer.

    Attributes:
        steps: optimizer steps.
        batch_size: images per step.
        shift: largest random shift in pixels; the augmentation also mirrors images.
        seed: seed of the initial weights, the order of the images and the augmentation.
    """

    steps: int = number(1200, 1, MOST_STEPS)
    batch_size: int = number(32, 1, 2**20)
    shift: int = number(4, 0, 4096)
    seed: int = number(0, 0, MOST_SEED)

    def __post_init__(self) -> None:
        check_fields(self, "")


def psnr(images_BCHW: Tensor, reconstructions_BCHW: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of each image in dB, shape (B,). Pixels are in [0, 1]."""
    mse_B = (images_BCHW - reconstructions_BCHW).square().flatten(1).mean(1)
    return -10 * mse_B.clamp_min(1e-10).log10()


def code_usage(codes: Tensor, size: int) -> tuple[float, float]:
    """Return the perplexity of codes from 0 to size - 1, and the number of codes that occur."""
    counts = torch.bincount(codes.flatten(), minlength=size).double()
    p = counts[counts > 0] / counts.sum()
    return float((-(p * p.log()).sum()).exp()), float(len(p))


def quantizer_class() -> type[nn.Module]:
    """Return `VectorQuantize` of vector-quantize-pytorch.

    Raises:
        UserError: the extra `[vq]` is not installed.
    """
    try:
        from vector_quantize_pytorch import VectorQuantize
    except ImportError as error:
        raise UserError(
            "Training the image tokenizer needs vector-quantize-pytorch: run `pip install 'mmqk[vq]'`."
        ) from error
    return VectorQuantize


class VQModule(L.LightningModule):
    """Autoencoder with a quantizer; logs PSNR, code perplexity, codes used and reconstructions."""

    def __init__(self, config: ImageTokenizerConfig, training: VQTrainingConfig) -> None:
        super().__init__()
        self.training_config = training
        self.log_every = min(LOG_EVERY, training.steps)
        vectors = training.batch_size * config.grid**2  # in a batch, from which k-means starts the codebook
        self.quantizer = quantizer_class()(
            dim=config.code_dim,
            codebook_size=config.codes,
            decay=DECAY,
            kmeans_init=True,
            threshold_ema_dead_code=min(DEAD_BELOW, DEAD_SHARE * vectors / config.codes),
            commitment_weight=COMMITMENT,
            rotation_trick=False,
            accept_image_fmap=True,
        )
        self.model = ImageTokenizer(config)
        self.model.to(memory_format=torch.channels_last)  # 1.5 times as fast as the default format on a CPU
        self.held_out: list[dict[str, Tensor]] = []

    def reconstruct(self, images_BCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the reconstructions (not clamped), the codes (B, G, G) and the commitment loss."""
        z_BDGG = self.model.features(images_BCHW.contiguous(memory_format=torch.channels_last))
        quantized_BDGG, codes, commitment = self.quantizer(z_BDGG)
        return self.model.decoder(quantized_BDGG), codes, commitment.sum()

    def augment(self, images_BCHW: Tensor) -> Tensor:
        """Mirror each image with probability 1/2, and shift the batch by a random number of pixels."""
        shift, side = self.training_config.shift, images_BCHW.shape[-1]
        mirrored_B = torch.rand(len(images_BCHW), device=images_BCHW.device) < 0.5
        x_BCHW = torch.where(mirrored_B[:, None, None, None], images_BCHW.flip(3), images_BCHW)
        dy, dx = torch.randint(0, 2 * shift + 1, (2,)).tolist()
        return F.pad(x_BCHW, (shift,) * 4, mode="replicate")[:, :, dy : dy + side, dx : dx + side]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.augment(batch.float() / 255)
        y, codes, commitment = self.reconstruct(x)
        edge = (y.diff(dim=3) - x.diff(dim=3)).abs().mean() + (y.diff(dim=2) - x.diff(dim=2)).abs().mean()
        l1 = F.l1_loss(y, x)
        loss = l1 + EDGE * edge / 2 + SQUARED * F.mse_loss(y, x) + commitment
        if (batch_idx + 1) % self.log_every == 0:
            perplexity, _ = code_usage(codes, self.model.size)
            quality = psnr(x, y.detach().clamp(0, 1)).mean()
            self.log_dict(
                {"train/loss": loss, "train/l1": l1, "train/edge": edge, "train/commitment": commitment,
                 "train/psnr": quality, "train/batch_perplexity": perplexity}
            )  # fmt: skip
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        x = batch.float() / 255
        y, codes, _ = self.reconstruct(x)
        y = y.clamp(0, 1)
        shown = {"x": x[:SHOWN_IMAGES], "y": y[:SHOWN_IMAGES]}
        self.held_out.append({"psnr": psnr(x, y), "codes": codes.flatten(1), **shown})

    def on_validation_epoch_end(self) -> None:
        parts, self.held_out = self.held_out, []
        perplexity, used = code_usage(torch.cat([part["codes"] for part in parts]), self.model.size)
        quality = torch.cat([part["psnr"] for part in parts]).mean()
        self.log_dict({"val/psnr": quality, "val/perplexity": perplexity, "val/codes_used": used})
        step = f"image: step {self.global_step}/{self.training_config.steps}"
        numbers = f"PSNR {quality:.2f} dB, perplexity {perplexity:.0f}, {used:.0f} codes used"
        print(f"{step}, held out: {numbers}", file=sys.stderr, flush=True)
        board: Any = getattr(self.logger, "experiment", None)
        if board is not None:
            pairs = torch.cat([parts[0]["x"], parts[0]["y"]])
            grid = make_grid(pairs, nrow=len(parts[0]["x"]), padding=2, pad_value=1.0)
            board.add_image("val/originals_above_reconstructions", grid, self.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=1e-4)
        # One step more, because Lightning also steps the schedule after the last step.
        cycle = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, LR, total_steps=self.training_config.steps + 1, pct_start=0.05
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}

    def export(self) -> ImageTokenizer:
        """Return the trained tokenizer with its codebook, in evaluation mode."""
        quantizer: Any = self.quantizer
        self.model.codebook_VD.copy_(quantizer.codebook.detach())
        return self.model.to(memory_format=torch.contiguous_format).eval().requires_grad_(False)


def train_image_tokenizer(
    train_BCHW: Tensor, val_BCHW: Tensor, config: ImageTokenizerConfig, training: VQTrainingConfig, **trainer_flags: Any
) -> ImageTokenizer:
    """Train on uint8 images. On a CPU, the weights depend only on the images, the settings and the number of threads.

    `trainer_flags` are arguments of Lightning's Trainer (logger, progress bar, validation interval).

    Raises:
        UserError: the extra `[vq]` is missing.
    """
    L.seed_everything(training.seed, verbose=False)
    module = VQModule(config, training)
    order = RandomSampler(
        range(len(train_BCHW)),
        num_samples=training.steps * training.batch_size,
        generator=torch.Generator().manual_seed(training.seed),
    )
    batches = BatchSampler(order, training.batch_size, drop_last=True)
    trainer = L.Trainer(
        max_steps=training.steps,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=module.log_every,
        gradient_clip_val=1.0,
        **trainer_flags,
    )
    trainer.fit(
        module,
        DataLoader(train_BCHW, sampler=batches, batch_size=None),  # type: ignore[arg-type]
        DataLoader(val_BCHW.split(config.images_at_once), batch_size=None),
    )
    return module.cpu().export()
