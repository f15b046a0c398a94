"""Measures parent and fork on the probe batch: the sizes of activations at every norm, and the change of the outputs.

Shapes: M modalities, H heads, K head_dim, N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmqk.data.batch import TokenBatch
from mmqk.model import EarlyFusionTransformer
from mmqk.model.backends import documents_of, visible_keys
from mmqk.model.linear import ByModality
from mmqk.model.norms import LayerNorm, Norm
from mmqk.model.transformer import capped
from mmqk.training.losses import modality_losses

CHUNK = 4  # sequences per forward pass


@dataclass
class Sizes:
    """Sums of squares at one norm, by modality of the token and by head (a norm of the residual stream has one head).

    Attributes:
        sums_MH: By name: "plain" for the input normalized by the parent's norm, before its gain, or for the input
            itself if the parent has no norm here (if the fork's norm is a LayerNorm, the mean is subtracted first);
            "out" for the output of the parent's norm; "other" for the input normalized by the fork's norm, before its
            gain.
        count_M: Number of values in each sum.
    """

    sums_MH: dict[str, Tensor]
    count_M: Tensor

    def add(self, more: Sizes) -> None:
        self.count_M += more.count_M
        for of, sums_MH in more.sums_MH.items():
            self.sums_MH[of] += sums_MH

    def mean(self, of: str, modality: int | None) -> Tensor:
        """Return the mean square by head, (H,), over the tokens of a modality, or over all tokens if the modality is
        None or has no tokens."""
        sums_MH = self.sums_MH[of]
        if modality is None or not self.count_M[modality]:
            return sums_MH.sum(0) / self.count_M.sum()
        return sums_MH[modality] / self.count_M[modality]


def parts_of(batch: TokenBatch) -> Iterator[TokenBatch]:
    """Yield the batch in parts of `CHUNK` sequences."""
    for start in range(0, len(batch.ids_BT), CHUNK):
        yield batch._map(lambda t, s=start: t[s : s + CHUNK] if t.ndim else t)  # type: ignore[misc]


def one_copy(norm: nn.Module) -> nn.Module:
    """Return the norm, or the first of its copies: the copies differ in gain and bias only."""
    return norm.copies[0] if isinstance(norm, ByModality) else norm


def _normalized(norm: nn.Module, x: Tensor) -> Tensor:
    norm = one_copy(norm)
    return norm.normalize(x) if isinstance(norm, Norm) else x


@torch.no_grad()
def sizes_at_norms(old: EarlyFusionTransformer, new: EarlyFusionTransformer, batch: TokenBatch) -> dict[str, Sizes]:
    """Return the `Sizes` at every norm of the parent or the fork, by the norm's name. Padding is excluded.

    Args:
        old: The parent, which runs a forward pass.
        new: The fork, whose norms are applied to the inputs of the parent's norms.
        batch: The probe batch.
    """
    fork_modules, sizes = dict(new.named_modules()), dict[str, Sizes]()
    M = len(old.config.modalities)

    def hook(name: str):
        def look(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            valid_N = part.valid_BT.flatten()  # of the part in this forward pass
            modality_N = part.modality_BT.flatten()[valid_N]
            x = args[0].float()

            def squares(y: Tensor) -> Tensor:
                y_NHK = y.flatten(0, 1)[valid_N].double().square()
                y_NH = y_NHK.sum(-1) if y_NHK.ndim == 3 else y_NHK.sum(-1, keepdim=True)
                return y_NH.new_zeros(M, y_NH.shape[1]).index_add_(0, modality_N, y_NH)

            plain, other = _normalized(module, x), one_copy(fork_modules[name])
            if isinstance(other, LayerNorm):
                plain = plain - plain.mean(other.axes, keepdim=True)
            sums_MH = {"plain": squares(plain), "out": squares(out), "other": squares(_normalized(other, x))}
            here = Sizes(sums_MH, torch.bincount(modality_N, minlength=M) * x.shape[-1])
            sizes[name].add(here) if name in sizes else sizes.update({name: here})

        return look

    handles = [
        module.register_forward_hook(hook(name)) for name, module in old.named_modules() if name.endswith("_norm")
    ]
    try:
        for part in parts_of(batch):
            old(part.ids_BT, part.modality_BT, part.document_BT)
    finally:
        for handle in handles:
            handle.remove()
    return sizes


@torch.no_grad()
def mean_log_sums(model: EarlyFusionTransformer, batch: TokenBatch) -> Tensor:
    """Return the mean over queries of log Σ exp(logit) in each layer and head, (L, H), without padding."""
    c, sums_LH, queries = model.config, torch.zeros(model.config.n_layers, model.config.n_heads), 0
    q_BHTK: dict[int, Tensor] = {}

    def observer(site: str, layer: int, x_BHTK: Tensor) -> None:
        if site == "q":
            q_BHTK[layer] = x_BHTK
        elif site == "k":
            logits_BHTS = capped(c.attn_scale_value * q_BHTK.pop(layer) @ x_BHTK.mT, c.attn_softcap)
            documents_BT = documents_of(c, c.separates(layer), part.modality_BT, part.document_BT)
            visible = visible_keys(x_BHTK.shape[2], x_BHTK.device, c.window_of(layer), documents_BT)
            log_sums_BHT = logits_BHTS.masked_fill(~visible, -torch.inf).logsumexp(-1)
            sums_LH[layer] += log_sums_BHT.transpose(1, 2)[part.valid_BT].sum(0).to(sums_LH)

    for part in parts_of(batch):
        model(part.ids_BT, part.modality_BT, part.document_BT, observer=observer)
        queries += int(part.valid_BT.sum())
    return sums_LH / queries


@dataclass(frozen=True)
class Change:
    """The difference between the outputs of a fork and its parent, in fp32 and without dropout.

    Attributes:
        logits: RMS of the difference of the output logits, divided by the RMS of the parent's logits.
        loss: Mean cross-entropy of parent and fork by target modality, nats.
    """

    logits: float
    loss: dict[str, tuple[float, float]]


@torch.no_grad()
def change_of_function(old: EarlyFusionTransformer, new: EarlyFusionTransformer, batch: TokenBatch) -> Change:
    """Compare the outputs of both models on the same tokens; logits at padding are excluded.

    Both models are in evaluation mode.
    """
    names = old.config.modalities
    difference = size = torch.zeros((), dtype=torch.float64, device=batch.ids_BT.device)
    sums: list[Tensor] = [torch.zeros(len(names), dtype=torch.float64, device=size.device) for _ in range(3)]
    for part in parts_of(batch):
        logits = [m(part.ids_BT, part.modality_BT, part.document_BT) for m in (old, new)]
        before_NV, after_NV = (x_BTV[part.valid_BT].double() for x_BTV in logits)
        difference = difference + (after_NV - before_NV).square().sum()
        size = size + before_NV.square().sum()
        losses = [
            modality_losses(x, part.targets_BT, part.target_modality_BT, part.target_mask_BT, len(names))
            for x in logits
        ]
        for total, value in zip(sums, (losses[0].count, losses[0].ce, losses[1].ce), strict=True):
            total += value
    rows = torch.stack(sums).T.tolist()
    loss = {name: (a / n, b / n) for name, (n, a, b) in zip(names, rows, strict=True) if n}
    return Change(float((difference / size).sqrt()), loss)
