"""Finds the first site of a forward or backward pass with a NaN or an infinity."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmqk.data.batch import TokenBatch
from mmqk.model import EarlyFusionTransformer
from mmqk.model.linear import through
from mmqk.model.transformer import Sink
from mmqk.monitors.measures.pairs import visible_pairs
from mmqk.monitors.measures.reduce import selection


def first_bad_site(
    model: EarlyFusionTransformer, batch: TokenBatch, loss: Callable[[Sink], Tensor] | None = None
) -> str | None:
    """The first site with a number that is not finite, such as ``attn_logits of layer 3, at image tokens, is inf``.

    It checks in this order: the weights, the sites of a forward (`EarlyFusionTransformer.forward` lists them) with
    the attention logits by query, and the loss; then, if ``loss`` is given, the gradients at the sites from last to
    first, and those of the parameters. It runs in the caller's mode and precision, does not write to ``.grad``, and
    synchronizes with the host.

    Args:
        model: the model with its current weights.
        batch: the input.
        loss: runs ``model`` on ``batch`` with the sink that it gets, and returns the loss.

    Returns:
        The description, or None if everything is finite.
    """
    for name, p in model.named_parameters():
        if kind := _kind(p.detach()):
            return f"the weight {name} is {kind}"
    look = _Look(model, batch)
    if loss is None:
        with torch.no_grad():
            model(batch.ids_BT, batch.modality_BT, batch.document_BT, look.forward)
        return look.first
    with torch.enable_grad():
        value = loss(look.forward)
        look.unseen_logits()
        if look.first is not None:
            return look.first
        if kind := _kind(value.detach()):
            return f"the loss is {kind} though all logits are finite"
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        gradients = torch.autograd.grad(value, [p for _, p in named], allow_unused=True)
    if look.first is not None:
        return look.first
    for (name, _), gradient in zip(named, gradients, strict=True):
        if gradient is not None and (kind := _kind(gradient)):
            return f"the gradient of {name} is {kind}"
    return None


def _kind(tensor: Tensor) -> str | None:
    if torch.isfinite(tensor).all():
        return None
    return "NaN" if torch.isnan(tensor).any() else "infinite"


class _Look:
    """Checks the sites of a forward and their gradients, and keeps the first bad one."""

    def __init__(self, model: EarlyFusionTransformer, batch: TokenBatch) -> None:
        self.model, self.batch = model, batch
        self.first: str | None = None
        self.names = (*model.config.modalities, "padding")
        valid_MBT = selection(batch.modality_BT, batch.valid_BT, len(model.config.modalities))
        self.of_MBT = torch.cat([valid_MBT, ~batch.valid_BT[None]])
        self.q_BHTK: Tensor | None = None
        self.final_BTD: Tensor | None = None

    def forward(self, site: str, layer: int, tensor: Tensor) -> None:
        if self.first is not None:
            return
        self._see(site, layer, tensor.detach())
        if site == "q":
            self.q_BHTK = tensor.detach()
        elif site == "k" and self.first is None:
            self._logits(layer, tensor.detach())
        elif site in ("final", "logits"):
            self.final_BTD = tensor.detach() if site == "final" else None
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self._see(f"the gradient at {site}", layer, gradient))

    @torch.no_grad()
    def unseen_logits(self) -> None:
        """Check the logits by sequence if the forward stopped before the head, as with a chunked loss."""
        if self.first is not None or self.final_BTD is None:
            return
        bad, nan = [], []
        for b in range(len(self.final_BTD)):
            row = slice(b, b + 1)
            hidden_1TD = through(self.model.final_norm, self.final_BTD[row], self.batch.modality_BT[row])
            logits_1TV = self.model.head(hidden_1TD)
            bad.append((~torch.isfinite(logits_1TV)).any(-1))
            nan.append(torch.isnan(logits_1TV).any())
        bad_BT = torch.cat(bad)
        if bad_BT.any():
            self._name("logits", -1, bad_BT, torch.stack(nan).any())

    def _see(self, site: str, layer: int, tensor: Tensor) -> None:
        if self.first is not None or bool(torch.isfinite(tensor).all()):
            return
        wide_BHTX = tensor if tensor.ndim == 4 else tensor[:, None]
        self._name(site, layer, ~torch.isfinite(wide_BHTX).all(-1).all(1), torch.isnan(tensor).any())

    def _name(self, site: str, layer: int, bad_BT: Tensor, nan: Tensor) -> None:
        present = (self.of_MBT & bad_BT).flatten(1).any(1).tolist()
        at = " and ".join(name for name, is_bad in zip(self.names, present, strict=True) if is_bad)
        of = f" of layer {layer}" if layer >= 0 else ""
        self.first = f"{site}{of}, at {at} tokens, is {'NaN' if nan else 'infinite'}"

    def _logits(self, layer: int, k_BHTK: Tensor) -> None:
        """Check the logits of visible pairs by sequence: finite queries and keys may have an infinite product."""
        assert self.q_BHTK is not None
        batch, window = self.batch, self.model.config.window_of(layer)
        visible_BTS = visible_pairs(batch.valid_BT, batch.document_BT, window)
        q, k = self.model.attn_scale_value * self.q_BHTK.float(), k_BHTK.float()
        bad, nan = [], []
        with torch.autocast(q.device.type, enabled=False):
            for q_HTK, k_HSK, visible_TS in zip(q, k, visible_BTS, strict=True):
                logits_HTS = (q_HTK @ k_HSK.transpose(-1, -2)).masked_fill(~visible_TS, 0.0)
                bad.append((~torch.isfinite(logits_HTS)).any(-1).any(0))
                nan.append(torch.isnan(logits_HTS).any())
        bad_BT = torch.stack(bad)
        if bad_BT.any():
            self._name("attn_logits", layer, bad_BT, torch.stack(nan).any())
