"""Faults of the bench. ``model.patch`` names a function of a model, ``data.patch`` one of the rows of a step.

A fault of the data begins at step `BEGINS`, if its function does not say otherwise. A fault of the model begins where
the model is built: at step 0, or at the fork that names it. All are pure functions of their arguments.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from mmqk.model.attention import Attention

if TYPE_CHECKING:
    from mmqk.data.order import TrainingOrder
    from mmqk.data.sequences import Row
    from mmqk.model import EarlyFusionTransformer

BEGINS = 300
LAYER, HEAD = 1, 0  # of the faults of one head
BURST = 20  # steps


class OverTokens(nn.Module):
    """RMS-norm over the tokens of a row instead of over the channels of a head."""

    def forward(self, x_BTHK: Tensor) -> Tensor:
        return x_BTHK * torch.rsqrt(x_BTHK.square().mean(1, keepdim=True) + 1e-5)


class WithoutGain(nn.Module):
    """A norm whose gain exists and is not used."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones_like(next(norm.parameters())))

    def forward(self, x_BTHK: Tensor) -> Tensor:
        return x_BTHK * torch.rsqrt(x_BTHK.square().mean(-1, keepdim=True) + 1e-5)


def norm_over_tokens(model: EarlyFusionTransformer) -> None:
    """Normalize queries and keys over the wrong axis."""
    for attention in _attentions(model):
        attention.q_norm, attention.k_norm = OverTokens(), OverTokens()


def gain_unused(model: EarlyFusionTransformer) -> None:
    """Create the gains of QK-Norm and do not use them. The model must have QK-Norm."""
    for attention in _attentions(model):
        attention.q_norm, attention.k_norm = WithoutGain(attention.q_norm), WithoutGain(attention.k_norm)


@torch.no_grad()
def loud_head(model: EarlyFusionTransformer) -> None:
    """Multiply W_q of one head by 8."""
    _attentions(model)[LAYER].w_q.weight[_channels(model)] *= 8


@torch.no_grad()
def dead_head(model: EarlyFusionTransformer) -> None:
    """Set W_v and W_o of one head to 0: neither gets a gradient."""
    attention = _attentions(model)[LAYER]
    attention.w_v.weight[_channels(model)] = 0
    attention.w_o.weight[:, _channels(model)] = 0


@torch.no_grad()
def uniform_attention(model: EarlyFusionTransformer) -> None:
    """Set all W_q and W_k to 0: every key always gets the same weight, so attention has rank 1."""
    for attention in _attentions(model):
        attention.w_q.weight.zero_()
        attention.w_k.weight.zero_()


@torch.no_grad()
def loud_image_rows(model: EarlyFusionTransformer) -> None:
    """Multiply the image rows of the embedding matrix by 10."""
    place = model.config.modalities.index("image")
    first, end, _ = model.embed.row_scales[place]
    model.embed.weight[first:end] *= 10


def bf16_stream(model: EarlyFusionTransformer) -> None:
    """Round the residual stream to bf16 after each block."""
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, output: (output[0].bfloat16().to(output[0].dtype), output[1]))


def bf16_gains(model: EarlyFusionTransformer) -> None:
    """Keep all gains in bf16, in which a small update changes nothing."""
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.to(torch.bfloat16)


def future_leak(model: EarlyFusionTransformer) -> None:
    """Add half of the next token's embedding to each token."""
    model.embed.register_forward_hook(lambda _, __, x_BTD: x_BTD + 0.5 * x_BTD.roll(-1, dims=1))


def corrupted_rows(rows: list[Row], step: int, order: TrainingOrder) -> list[Row]:
    """Replace all tokens by random tokens, for 40 steps."""
    return [_random(row, step, i, order) for i, row in enumerate(rows)] if 0 <= step - BEGINS < 40 else rows


def one_bad_batch(rows: list[Row], step: int, order: TrainingOrder) -> list[Row]:
    """Replace all tokens by random tokens, for one step. This is a hard batch, not a fault."""
    return [_random(row, step, i, order) for i, row in enumerate(rows)] if step == BEGINS else rows


def one_batch(rows: list[Row], step: int, order: TrainingOrder) -> list[Row]:
    """Train on the same batch in every step."""
    return rows if step < BEGINS else _rows_of(BEGINS, len(rows), order)


def seen_again(rows: list[Row], step: int, order: TrainingOrder) -> list[Row]:
    """Train on the batches of the first `BURST` steps again and again."""
    return rows if step < BEGINS else _rows_of(step % BURST, len(rows), order)


def shuffled_images(rows: list[Row], step: int, order: TrainingOrder) -> list[Row]:
    """Give each caption the image of the next pair of the step."""
    masks = [_is_image(row, order) for row in rows]
    pairs = [i for i, mask in enumerate(masks) if mask.any()]
    if step < BEGINS or len(pairs) < 2:
        return rows
    changed = list(rows)
    for i, other in zip(pairs, [*pairs[1:], pairs[0]], strict=True):
        ids, codes = rows[i].ids.copy(), rows[other].ids[masks[other]]
        if masks[i].sum() == len(codes):
            ids[masks[i]] = codes
            changed[i] = replace(rows[i], ids=ids)
    return changed


def codes_off_by_one(rows: list[Row], step: int, order: TrainingOrder) -> list[Row]:
    """Add 1 to each image code; the last one becomes the first."""
    if step < BEGINS:
        return rows
    first, size = _image_block(order)
    moved = [first + (row.ids - first + 1) % size for row in rows]
    return [replace(row, ids=np.where(_is_image(row, order), m, row.ids)) for row, m in zip(rows, moved, strict=True)]


def shifted_targets(rows: list[Row], step: int, order: TrainingOrder) -> list[Row]:
    """Train each position on the token after the next one, from the first step."""
    return [replace(row, target_ids=np.append(row.ids[1:], row.ids[-1])) for row in rows]


def bursts(rows: list[Row], step: int, order: TrainingOrder) -> list[Row]:
    """Take turns: `BURST` steps without images, `BURST` steps of rows with images."""
    if step < BEGINS:
        return rows
    wants_images, n, found = step // BURST % 2 == 1, step * len(rows), list[Any]()
    while len(found) < len(rows):  # rows of the other kind are skipped, not kept for later
        row = order.row(n)
        found += [row] if _is_image(row, order).any() == wants_images else []
        n += 1
    return found


def trained_padding(rows: list[Row], step: int, order: TrainingOrder) -> list[Row]:
    """Make the padding at the end of each row a target, from the first step."""
    length, pad = order.builder.seq_len, order.builder.layout.pad or 0
    return [replace(row, ids=np.pad(row.ids, (0, length - len(row.ids)), constant_values=pad)) for row in rows]


def _attentions(model: EarlyFusionTransformer) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def _channels(model: EarlyFusionTransformer) -> slice:
    return slice(HEAD * model.config.head_dim, (HEAD + 1) * model.config.head_dim)


def _rows_of(step: int, count: int, order: TrainingOrder) -> list[Row]:
    return [order.row(n) for n in range(step * count, (step + 1) * count)]


def _image_block(order: TrainingOrder) -> tuple[int, int]:
    """Return the first id of the image block and the number of its ids."""
    sizes = order.builder.layout.vocab_sizes
    names = list(sizes)
    return sum(sizes[name] for name in names[: names.index("image")]), sizes["image"]


def _is_image(row: Row, order: TrainingOrder) -> np.ndarray:
    first, size = _image_block(order)
    return (row.ids >= first) & (row.ids < first + size)


def _random(row: Row, step: int, place: int, order: TrainingOrder) -> Row:
    size = sum(order.builder.layout.vocab_sizes.values())
    return replace(row, ids=np.random.default_rng((step, place)).integers(size, size=len(row.ids)))
