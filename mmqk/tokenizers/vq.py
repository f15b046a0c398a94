"""Training the image tokenizer: timm features, an EMA codebook, a small decoder, as a Lightning module.

The quantiser is vector-quantize-pytorch's (the optional extra `[vq]`): a codebook by exponential moving
average (van den Oord et al., 1711.00937, appendix A), k-means on the first batch, and codes that nothing uses
replaced by vectors of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning as L
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler
from torchvision.utils import make_grid

from mmqk.ranges import BELOW_ONE, MOST_SEED, MOST_STEPS, check_fields, number
from mmqk.store import UserError
from mmqk.tokenizers.image import ImageTokenizer
from mmqk.tokenizers.image_config import ImageTokenizerConfig
from mmqk.tokenizers.measure import psnr, token_statistics
from mmqk.tokenizers.source import images_at_once

TIMM_MODEL = "convnext_atto"
SHOWN_IMAGES = 12
LOG_EVERY = 50


@dataclass(frozen=True)
class VQTrainingConfig:
    """How an image tokenizer is trained.

    Attributes:
        steps: optimizer steps.
        batch_size: images a step.
        lr: peak learning rate of AdamW; one cycle with 5 % warm-up.
        decay: of the codebook's moving averages, by step.
        dead_below: a code whose moving count falls below this is replaced by a vector of the batch.
        dead_share: the same as a share of an even count, vectors of a batch / codes; the lower of the two holds.
        commitment: weight of the commitment loss.
        edge: weight of the L1 loss on differences of neighbouring pixels, which keeps outlines sharp.
        squared: weight of the squared error beside the L1 loss.
        shift: largest random shift in pixels, which with mirroring is the augmentation.
        seed: of weights, order and augmentation.
    """

    steps: int = number(1200, 1, MOST_STEPS)
    batch_size: int = number(32, 1, 2**20)
    lr: float = number(3e-3, 1e-12, 1e3)
    decay: float = number(0.97, 0.0, BELOW_ONE)
    dead_below: float = number(2.0, 0.0, 1e9)
    dead_share: float = number(0.5, 0.0, 1e3)
    commitment: float = number(0.25, 0.0, 1e6)
    edge: float = number(0.5, 0.0, 1e6)
    squared: float = number(2.0, 0.0, 1e6)
    shift: int = number(4, 0, 4096)
    seed: int = number(0, 0, MOST_SEED)

    def __post_init__(self) -> None:
        check_fields(self, "")

    def dead_count(self, config: ImageTokenizerConfig) -> float:
        """The moving count, vectors a step, below which a code of this tokenizer is replaced.

        A fixed count would replace every code of a large codebook at every step: 8,192 codes on batches of
        8,192 vectors have a count of 1 each when all are used alike.
        """
        return min(self.dead_below, self.dead_share * self.vectors(config) / config.codes)

    def vectors(self, config: ImageTokenizerConfig) -> int:
        """Vectors in a batch: what the codebook is started from."""
        return self.batch_size * config.grid**2


class TimmEncoder(nn.Module):
    """The last feature map of timm's ConvNeXt, untrained: what `ConvNeXtFeatures` restates."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        # timm starts blocks at a gain of 1e-6, for very deep networks; here that would only waste steps
        self.timm = timm.create_model(
            TIMM_MODEL,
            pretrained=False,
            features_only=True,
            out_indices=tuple(range(stages)),
            ls_init_value=1.0,
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.timm(x_BCHW)[-1]


def quantizer_class() -> type[nn.Module]:
    """`VectorQuantize` of vector-quantize-pytorch.

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


def vector_quantizer(config: ImageTokenizerConfig, training: VQTrainingConfig) -> nn.Module:
    """The quantiser of an image tokenizer in training; needs the extra as `quantizer_class` does."""
    return quantizer_class()(
        dim=config.code_dim,
        codebook_size=config.codes,
        decay=training.decay,
        kmeans_init=True,
        threshold_ema_dead_code=training.dead_count(config),
        commitment_weight=training.commitment,
        rotation_trick=False,
        accept_image_fmap=True,
    )


class VQModule(L.LightningModule):
    """Autoencoder with a quantised middle; logs PSNR, code perplexity, codes used and reconstructions."""

    def __init__(self, config: ImageTokenizerConfig, training: VQTrainingConfig) -> None:
        super().__init__()
        self.training_config = training
        self.log_every = min(LOG_EVERY, training.steps)
        self.quantizer = vector_quantizer(config, training)
        self.model = ImageTokenizer(config, encoder=TimmEncoder(config.stages))
        # on a CPU 1.5 times as fast
        self.model.to(memory_format=torch.channels_last)
        self.held_out: list[dict[str, Tensor]] = []

    def reconstruct(self, images_BCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Reconstructions (not clamped), codes (B, G, G) and the commitment loss."""
        z_BDGG = self.model.features(images_BCHW.contiguous(memory_format=torch.channels_last))
        quantised, codes, commitment = self.quantizer(z_BDGG)
        return self.model.decoder(quantised), codes, commitment.sum()

    def augment(self, images_BCHW: Tensor) -> Tensor:
        """Mirror each image with probability 1/2 and shift the batch by some pixels."""
        shift, side = self.training_config.shift, images_BCHW.shape[-1]
        mirrored_B = torch.rand(len(images_BCHW), device=images_BCHW.device) < 0.5
        x_BCHW = torch.where(mirrored_B[:, None, None, None], images_BCHW.flip(3), images_BCHW)
        dy, dx = torch.randint(0, 2 * shift + 1, (2,)).tolist()
        return F.pad(x_BCHW, (shift,) * 4, mode="replicate")[:, :, dy : dy + side, dx : dx + side]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        config = self.training_config
        x = self.augment(batch.float() / 255)
        y, codes, commitment = self.reconstruct(x)
        edge = (y.diff(dim=3) - x.diff(dim=3)).abs().mean() + (y.diff(dim=2) - x.diff(dim=2)).abs().mean()
        l1 = F.l1_loss(y, x)
        loss = l1 + config.edge * edge / 2 + config.squared * F.mse_loss(y, x) + commitment
        if (batch_idx + 1) % self.log_every == 0:
            counts = token_statistics(codes, self.model.size)
            quality = psnr(x, y.detach().clamp(0, 1)).mean()
            self.log_dict(
                {"train/loss": loss, "train/l1": l1, "train/edge": edge, "train/commitment": commitment,
                 "train/psnr": quality, "train/batch_perplexity": counts.perplexity}
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
        counts = token_statistics(torch.cat([part["codes"] for part in parts]), self.model.size)
        quality = torch.cat([part["psnr"] for part in parts]).mean()
        self.log_dict(
            {"val/psnr": quality, "val/perplexity": counts.perplexity, "val/codes_used": float(counts.used)}
        )
        board: Any = getattr(self.logger, "experiment", None)
        if board is not None:
            pairs = torch.cat([parts[0]["x"], parts[0]["y"]])
            grid = make_grid(pairs, nrow=len(parts[0]["x"]), padding=2, pad_value=1.0)
            board.add_image("val/originals_above_reconstructions", grid, self.global_step)

    def configure_optimizers(self) -> Any:
        lr, steps = self.training_config.lr, self.training_config.steps
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=1e-4)
        # one step more than are taken: Lightning steps the schedule after the last one, too
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps + 1, pct_start=0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}

    def export(self) -> ImageTokenizer:
        """The trained weights as a plain-torch tokenizer on the CPU, in evaluation mode."""
        plain = ImageTokenizer(self.model.config)
        encoder: Any = self.model.encoder
        plain.encoder.load_state_dict(encoder.timm.state_dict())
        plain.project.load_state_dict(self.model.project.state_dict())
        plain.decoder.load_state_dict(self.model.decoder.state_dict())
        quantizer: Any = self.quantizer
        plain.codebook_VD.copy_(quantizer.codebook.detach())
        return plain.eval().requires_grad_(False)


class ImageBatches(Dataset):
    """Whole batches of one uint8 tensor (B, 3, H, W) by lists of indices."""

    def __init__(self, images_BCHW: Tensor) -> None:
        self.images_BCHW = images_BCHW

    def __getitem__(self, indices: list[int]) -> Tensor:
        return self.images_BCHW[indices]


def train_image_tokenizer(
    train_BCHW: Tensor,
    val_BCHW: Tensor,
    config: ImageTokenizerConfig,
    training: VQTrainingConfig,
    **trainer_flags: Any,
) -> ImageTokenizer:
    """Train on uint8 images; on a CPU, the same images, seed and threads give the same weights.

    `trainer_flags` go to Lightning's Trainer (logger, progress bar, validation interval).

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
    held_out = [chunk for chunk in val_BCHW.split(images_at_once(config))]
    trainer.fit(
        module,
        DataLoader(ImageBatches(train_BCHW), sampler=batches, batch_size=None),
        DataLoader(held_out, batch_size=None),  # type: ignore[arg-type]
    )
    return module.cpu().export()
