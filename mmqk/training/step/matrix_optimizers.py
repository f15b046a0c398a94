"""Optimizers other than AdamW for the matrices of the blocks, and AdamW with update clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, optim


class AdamVariant(optim.Optimizer):
    """AdamW with update clipping or with fixed norms, each set by a field of the parameter group.

    ```
    m <- beta1 m + (1 - beta1) g,  v <- beta2 v + (1 - beta2) g^2,  u = mhat / (sqrt(vhat) + eps)

    update_clip   lr <- lr / max(1, sqrt(mean(g^2 / max(vhat, eps^2))))          StableAdamW, arXiv 2304.13013, Alg. 2
    fixed_norm    W' = W - lr u |W| / |u|,  W <- W' |W| / |W'|, without decay     AdamH (Levanter)
    otherwise     W <- W - lr decay W - lr u                                      AdamW
    ```

    Under `fixed_norm` the Frobenius norm of W never changes, and lr is the length of a step relative to that norm.

    Args:
        params: Groups of parameters with their `weight_decay`, `update_clip` and `fixed_norm`.
        lr: Learning rate.
        betas: Decay of the moments.
        eps: Added to each square root of a second moment.
    """

    def __init__(self, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0}
        super().__init__(params, defaults | {"update_clip": False, "fixed_norm": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. If ``found_inf`` is set and true, no parameter changes."""
        result = closure_loss(closure)
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                changed = self._changed(p, p.grad, group)
                p.copy_(unless(getattr(self, "found_inf", None), p, changed))
        return result

    def _changed(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        state, (beta1, beta2), eps, lr = self.state[p], group["betas"], group["eps"], group["lr"]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        step = float(state["step"])
        first = state["exp_avg"].lerp_(g, 1 - beta1) / (1 - beta1**step)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2) / (1 - beta2**step)
        u = first / (second.sqrt() + eps)
        if group["fixed_norm"]:
            length = p.norm()
            moved = p - lr * _with_norm(u, length)
            return _with_norm(moved, length)
        if group["update_clip"]:
            lr = lr / (g.square() / second.clamp_min(eps**2)).mean().sqrt().clamp_min(1.0)
        return p - lr * group["weight_decay"] * p - lr * u


class WithMuon(optim.Optimizer):
    """Muon for the matrices of the blocks and AdamW for all other parameters (Kimi K2, arXiv 2507.20534).

    This uses `torch.optim.Muon` with updates that have the RMS of AdamW's updates: `0.2 sqrt(max(A, B))` times the
    orthogonalized momentum of an (A, B) matrix.

    Args:
        matrices: Groups for Muon.
        others: Groups for AdamW.
        lr: Learning rate of both.
        betas: Decay of AdamW's moments.
        eps: AdamW's epsilon.
        momentum: Decay of Muon's momentum.
    """

    def __init__(
        self,
        matrices: list[Any],
        others: list[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
    ) -> None:
        self.adam = optim.AdamW(others, lr=lr, betas=betas, eps=eps, fused=True)
        self.muon = optim.Muon(matrices, lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        super().__init__([*self.adam.param_groups, *self.muon.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of both optimizers. If ``found_inf`` is set and true, no parameter changes."""
        result = closure_loss(closure)
        found_inf = getattr(self, "found_inf", None)
        # `load_state_dict` replaces the groups and the state of this optimizer, so update both inner optimizers.
        n = len(self.adam.param_groups)
        self.adam.param_groups, self.muon.param_groups = self.param_groups[:n], self.param_groups[n:]
        self.adam.state = self.muon.state = self.state
        self.adam.found_inf = found_inf  # type: ignore[attr-defined]
        self.adam.step()
        matrices = [p for group in self.muon.param_groups for p in group["params"]]
        before = matrices if found_inf is None else [p.clone() for p in matrices]
        self.muon.step()
        for p, old in zip(matrices, before, strict=True):
            p.copy_(unless(found_inf, old, p))
        return result


def _with_norm(x: Tensor, length: Tensor) -> Tensor:
    """Return `x` scaled to the Frobenius norm `length`; 0 if `x` is 0."""
    norm = x.norm()
    return x * torch.where(norm > 0, length / norm, 0.0)


def closure_loss(closure: Callable[[], Any] | None) -> Any:
    """Return the loss of Lightning's closure, which computes the gradients."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def unless(found_inf: Tensor | None, before: Tensor, after: Tensor) -> Tensor:
    """Return ``after``, or ``before`` if ``found_inf`` is true, without synchronizing with the host."""
    return after if found_inf is None else torch.where(found_inf.bool(), before, after)
