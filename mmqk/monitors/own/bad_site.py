"""Finds the first site of a forward or backward pass with a NaN or an infinity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mmqk.data.batch import TokenBatch
from mmqk.model import EarlyFusionTransformer
from mmqk.model.backends import documents_of
from mmqk.model.linear import through
from mmqk.model.transformer import Observer
from mmqk.monitors.formulas.reduce import kind_of, selection, visible_pairs


def first_bad_site(model: EarlyFusionTransformer, batch: TokenBatch, loss: Callable[[Observer], Tensor]) -> str | None:
    """Return a description of the first site with a NaN or an infinity, such as ``attn_logits of layer 3, at image
    tokens, is infinite``.

    The function first checks the weights, then the sites of a forward pass (`EarlyFusionTransformer.forward` lists
    them), the attention logits, the loss, the gradients at the sites from the last to the first, and the gradients of
    the parameters. It runs in the caller's mode and precision, does not write ``.grad``, and synchronizes with the
    host.

    Args:
        model: the model with its current weights.
        batch: the input.
        loss: gets an observer, runs ``model`` on ``batch`` with it, and returns the loss.

    Returns:
        The description, or None if everything is finite.
    """
    for name, p in model.named_parameters():
        if kind := kind_of(p.detach()):
            return f"the weight {name} is {kind}"
    sites = _Sites(model, batch)
    with torch.enable_grad():
        value = loss(sites.check)
        sites.check_missing_logits()
        if sites.first_bad is not None:
            return sites.first_bad
        if kind := kind_of(value.detach()):
            return f"the loss is {kind} though all logits are finite"
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        gradients = torch.autograd.grad(value, [p for _, p in named], allow_unused=True)
    if sites.first_bad is not None:
        return sites.first_bad
    for (name, _), gradient in zip(named, gradients, strict=True):
        if gradient is not None and (kind := kind_of(gradient)):
            return f"the gradient of {name} is {kind}"
    return None


def first_bad_state(model: nn.Module, optimizers: Iterable[Optimizer]) -> str | None:
    """Return a description of the first weight or optimizer state with a NaN or an infinity; None if all are finite.

    It synchronizes with the host once.
    """
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    named = [(f"the weight {name}", p.detach()) for p, name in names.items()]
    for optimizer in optimizers:
        for p, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    named.append((f"the optimizer's {key} of {names.get(p, 'a weight')}", value))
    if torch.stack([torch.isfinite(x).all().to(named[0][1].device) for _, x in named]).all():
        return None
    return next(f"{name} is {kind}" for name, x in named if (kind := kind_of(x)))


class _Sites:
    """Checks the sites of a forward pass and their gradients, and describes the first bad one."""

    def __init__(self, model: EarlyFusionTransformer, batch: TokenBatch) -> None:
        self.model, self.batch = model, batch
        self.first_bad: str | None = None
        self.names = (*model.config.modalities, "padding")
        valid_MBT = selection(batch.modality_BT, batch.valid_BT, len(model.config.modalities))
        self.selected_MBT = torch.cat([valid_MBT, ~batch.valid_BT[None]])
        self.q_BHTK: Tensor | None = None
        self.final_BTD: Tensor | None = None

    def check(self, site: str, layer: int, tensor: Tensor) -> None:
        """Check one tensor; this is the observer of the forward pass."""
        self._check(site, layer, [tensor.detach()])
        if self.first_bad is not None:
            return
        if site == "q":
            self.q_BHTK = tensor.detach()
        elif site == "k":
            self._check("attn_logits", layer, self._attention_logits(layer, tensor.detach()))
        elif site in ("final", "logits"):
            self.final_BTD = tensor.detach() if site == "final" else None
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self._check(f"the gradient at {site}", layer, [gradient]))

    @torch.no_grad()
    def check_missing_logits(self) -> None:
        """Check the logits if the forward pass stopped before the head, as with a chunked loss."""
        if self.final_BTD is not None:
            self._check("logits", -1, self._logits(self.final_BTD))

    def _check(self, site: str, layer: int, parts: Iterable[Tensor]) -> None:
        """Store a description of the site if a value is not finite.

        Each part contains some of the sequences and has the shape (b, T, X) or (b, H, T, X).
        """
        if self.first_bad is not None:
            return
        bad, has_nan = [], False
        for part in parts:
            finite = torch.isfinite(part).all(-1)
            bad.append(~(finite.all(1) if finite.ndim == 3 else finite))
            has_nan = has_nan or bool(bad[-1].any() and torch.isnan(part).any())
        bad_BT = torch.cat(bad)
        if not bad_BT.any():
            return
        at = (self.selected_MBT & bad_BT).flatten(1).any(1).tolist()
        tokens = " and ".join(name for name, is_bad in zip(self.names, at, strict=True) if is_bad)
        of_layer = f" of layer {layer}" if layer >= 0 else ""
        self.first_bad = f"{site}{of_layer}, at {tokens} tokens, is {'NaN' if has_nan else 'infinite'}"

    def _logits(self, final_BTD: Tensor) -> Iterator[Tensor]:
        """Yield the output logits of each sequence."""
        for b in range(len(final_BTD)):
            row = slice(b, b + 1)
            hidden_1TD = through(self.model.final_norm, final_BTD[row], self.batch.modality_BT[row])
            yield self.model.head(hidden_1TD)

    def _attention_logits(self, layer: int, k_BHTK: Tensor) -> Iterator[Tensor]:
        """Yield the visible attention logits of each sequence, which can be infinite even if queries and keys are
        finite."""
        assert self.q_BHTK is not None
        batch, config = self.batch, self.model.config
        document_BT = documents_of(config, config.separates(layer), batch.modality_BT, batch.document_BT)
        visible_BTS = visible_pairs(batch.valid_BT, document_BT, config.window_of(layer))
        q, k = self.model.attn_scale_value * self.q_BHTK.float(), k_BHTK.float()
        with torch.autocast(q.device.type, enabled=False):
            for q_HTK, k_HSK, visible_TS in zip(q, k, visible_BTS, strict=True):
                yield (q_HTK @ k_HSK.transpose(-1, -2)).masked_fill(~visible_TS, 0.0)[None]
