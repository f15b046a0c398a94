"""The optimizer of a run, both conventions of weight decay, and the learning rate schedules.

Besides AdamW: update clipping, fixed norms and Muon for the matrices of the blocks, and moments by modality.
MSign orthogonalizes the matrices of attention between updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from mmqk.config.training import OptimConfig
from mmqk.distributed import summed, world_size
from mmqk.model import EarlyFusionTransformer


def lr_multiplier(config: OptimConfig, step: int, max_steps: int) -> float:
    """Return the learning rate of update ``step`` (counted from 0) divided by the peak learning rate."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    end = config.schedule_steps or max_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, end - config.warmup_steps))
    if config.schedule == "cosine":
        return config.final_lr_ratio + (1 - config.final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done))
    if config.schedule == "exponential":
        return config.final_lr_ratio**done
    return 1.0


def decays(config: OptimConfig, model: nn.Module) -> set[Tensor]:
    """Return the parameters with weight decay, chosen by the type of their module and not by their number of
    axes, because gains may also have two axes.

    Matrices are the weights of linear layers; a tied head counts as the embedding.
    """
    embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = {m.weight for m in model.modules() if isinstance(m, nn.Linear)} - embeddings
    rest = set(model.parameters()) - embeddings - matrices
    return matrices | (embeddings if config.decay_embeddings else set()) | (rest if config.decay_gains else set())


def hidden_matrices(model: nn.Module) -> set[Tensor]:
    """Return the weights of the linear layers in a transformer's blocks, without embedding and head."""
    blocks: nn.Module = getattr(model, "blocks", model)
    return {m.weight for m in blocks.modules() if isinstance(m, nn.Linear)}


@torch.no_grad()
def scale_initial(config: OptimConfig, model: EarlyFusionTransformer) -> None:
    """Give the initial weights the sizes of µP for Adam (Tensor Programs V, arXiv 2203.03466, Table 3).

    With m = d_model / base_width: the standard deviation of the embedding does not depend on m, that of the head is
    1 / m of its value at the base width, and those of the matrices of the blocks fall as 1 / sqrt(fan_in), as always.
    """
    if config.width_scaling == "mup":
        m = model.config.d_model / config.base_width
        model.embed.weight.mul_(m**0.5)  # from 1 / sqrt(d_model)
        model.head.weight.div_(m**0.5)


def _only(groups: list[dict[str, Any]], wanted: Callable[[Tensor], bool]) -> list[dict[str, Any]]:
    """Return the groups with only the wanted parameters, without groups that become empty."""
    parts = [{**group, "params": [p for p in group["params"] if wanted(p)]} for group in groups]
    return [part for part in parts if part["params"]]


def make_optimizer(config: OptimConfig, model: nn.Module) -> optim.Optimizer:
    """Return the optimizer of a run, with groups of parameters with and without weight decay."""
    parameters, decaying = [p for p in model.parameters() if p.requires_grad], decays(config, model)
    # torch decays by lr_t * weight_decay, with lr_t = peak * s_t and the schedule s_t. Dividing by the peak gives
    # s_t * weight_decay.
    decay = config.weight_decay / (config.lr if config.decay_mode == "independent" else 1.0)
    both = [
        {"params": [p for p in parameters if p in decaying], "weight_decay": decay},
        {"params": [p for p in parameters if p not in decaying], "weight_decay": 0.0},
    ]
    groups = [group for group in both if group["params"]]
    if config.width_scaling == "mup":
        assert isinstance(model, EarlyFusionTransformer)
        m, scaled = model.config.d_model / config.base_width, hidden_matrices(model) | {model.head.weight}
        # The first group has the learning rate that is logged. The decay is lr * weight_decay at every width.
        more = {"lr": config.lr / m, "weight_decay": decay * m}
        groups = [
            *_only(groups, lambda p: p not in scaled),
            *({**group, **more} for group in _only(groups, lambda p: p in scaled)),
        ]
    betas = (config.beta1, config.beta2)
    if config.matrices != "adamw":
        chosen = hidden_matrices(model)
        of_blocks = _only(groups, lambda p: p in chosen)
        others = _only(groups, lambda p: p not in chosen)
        if config.matrices == "muon":
            return WithMuon(of_blocks, others, config.lr, betas, config.eps)
        of_blocks = [{**group, "fixed_norm": True} for group in of_blocks]
        return AdamVariant([*others, *of_blocks], config.lr, betas, config.eps)
    if config.update_clip:
        return AdamVariant([{**group, "update_clip": True} for group in groups], config.lr, betas, config.eps)
    if config.split_second_moment:
        return SplitAdamW(groups, lr=config.lr, betas=betas, eps=config.eps)
    return optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def parameter_names(optimizer: optim.Optimizer, model: nn.Module) -> list[str]:
    """Return the names of the parameters in the order of the optimizer's state dict."""
    names = {p: name for name, p in model.named_parameters()}
    return [names[p] for group in optimizer.param_groups for p in group["params"]]


class HeldOptimizer(optim.Optimizer):
    """An optimizer that changes no parameter if its flag ``found_inf`` is set and true; its moments may change.

    The flag is a tensor on the device, as for torch's fused optimizers, so no step synchronizes with the host.
    """

    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, after Lightning's closure has computed the gradients."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.update()
        return result

    def update(self) -> None:
        """Update the parameters that have a gradient."""
        raise NotImplementedError

    def replace(self, p: Tensor, before: Tensor, after: Tensor) -> None:
        """Write ``after`` to the parameter, or ``before`` if ``found_inf`` is true."""
        p.copy_(after if self.found_inf is None else torch.where(self.found_inf.bool(), before, after))


class AdamVariant(HeldOptimizer):
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

    def update(self) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.replace(p, p, self._changed(p, p.grad, group))

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


class WithMuon(HeldOptimizer):
    """Muon for the matrices of the blocks and AdamW for all other parameters (Kimi K2, arXiv 2507.20534).

    This uses `torch.optim.Muon` with updates that have the RMS of AdamW's updates: `0.2 sqrt(max(A, B))` times the
    orthogonalized momentum of an (A, B) matrix.

    Args:
        matrices: Groups for Muon.
        others: Groups for AdamW.
        lr: Learning rate of both.
        betas: Decay of AdamW's moments; the first also of Muon's momentum.
        eps: AdamW's epsilon.
    """

    def __init__(
        self, matrices: list[Any], others: list[Any], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        self.adam = optim.AdamW(others, lr=lr, betas=betas, eps=eps, fused=True)
        self.muon = optim.Muon(matrices, lr=lr, momentum=betas[0], adjust_lr_fn="match_rms_adamw")
        super().__init__([*self.adam.param_groups, *self.muon.param_groups], {})

    def update(self) -> None:
        # `load_state_dict` replaces the groups and the state of this optimizer, so update both inner optimizers.
        n = len(self.adam.param_groups)
        self.adam.param_groups, self.muon.param_groups = self.param_groups[:n], self.param_groups[n:]
        self.adam.state = self.muon.state = self.state
        self.adam.found_inf = self.found_inf  # type: ignore[attr-defined]
        self.adam.step()
        matrices = [p for group in self.muon.param_groups for p in group["params"]]
        before = matrices if self.found_inf is None else [p.clone() for p in matrices]
        self.muon.step()
        for p, old in zip(matrices, before, strict=True):
            self.replace(p, old, p)


def _with_norm(x: Tensor, length: Tensor) -> Tensor:
    """Return `x` scaled to the Frobenius norm `length`; 0 if `x` is 0."""
    norm = x.norm()
    return x * torch.where(norm > 0, length / norm, 0.0)


class SplitAdamW(HeldOptimizer):
    """AdamW with separate first and second moments for each modality; a step is the sum of the modalities' steps.

    ```
    m_a <- beta1 m_a + (1 - beta1) g_a
    v_a <- beta2 v_a + (1 - beta2) g_a^2
    W   <- W - lr * decay * W - lr * sum_a mhat_a / (sqrt(vhat_a) + eps)
    ```

    g_a is the clipping factor, which the modalities share, times the gradient of modality a's part of the loss (with
    z-loss). Each part is divided by the number of trained targets of all modalities.

    This optimizer is for experiments. In AdamW, modalities with gradients of different size share v and may disturb
    each other (for AdamW with unequal gradients of modalities, see arXiv 2605.16165). Separate moments remove this
    coupling. For a parameter with gradients from only one modality, the step equals that of AdamW. With n modalities
    the step can be up to n times as long, so compare this optimizer at its own best learning rate. This optimizer
    needs n backward passes and n times the optimizer state.

    A modality absent from a step has a gradient of 0, like an embedding row under AdamW that no token uses. Its
    moments decay, its momentum still moves the weights, and its step count increases.

    Args:
        params: Parameters or parameter groups, each with its `weight_decay` (decoupled, as in torch).
        lr: Learning rate.
        betas: Decay of the moments.
        eps: Added to each square root of a second moment.
    """

    def __init__(self, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self._gradients: dict[Tensor, Tensor] = {}  # by parameter, modalities along the first axis

    def backward(self, losses: Sequence[Tensor]) -> None:
        """Add the gradient of each modality's loss, one backward pass each; `p.grad` becomes their sum.

        Every call needs the same number of losses in the same order; the last backward pass frees the graph.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        for a, loss in enumerate(losses):
            more = a + 1 < len(losses)
            gradients = torch.autograd.grad(loss, parameters, retain_graph=more, allow_unused=True)
            for p, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    if p not in self._gradients:
                        self._gradients[p] = gradient.new_zeros(len(losses), *gradient.shape)
                    self._gradients[p][a] += gradient
        for p, by_modality in self._gradients.items():
            p.grad = by_modality.sum(0)

    @torch.no_grad()
    def sum_ranks(self) -> None:
        """Sum the gradients over all processes, once before a step; a collective call.

        DistributedDataParallel synchronizes gradients only in ``loss.backward()``. `SplitAdamW.backward` calls
        ``torch.autograd.grad`` instead, so its gradients must be summed here.
        """
        if world_size() > 1:
            for p, by_modality in self._gradients.items():
                p.grad = summed(by_modality).sum(0)

    @torch.no_grad()
    def clip(self, factor: Tensor) -> None:
        """Scale every modality's gradients."""
        for by_modality in self._gradients.values():
            by_modality.mul_(factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, summed and by modality."""
        super().zero_grad(set_to_none)
        self._gradients.clear()

    def update(self) -> None:
        """Use the gradients of `backward`. A parameter without a gradient is unchanged, as in AdamW."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p in self._gradients):
                before = p if self.found_inf is None else p.clone()
                self._update(p, self._gradients[p], group)
                self.replace(p, before, p)

    def _update(self, p: Tensor, by_modality: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(by_modality), torch.zeros_like(by_modality)
        state["step"] += 1
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.lerp_(by_modality, 1 - beta1)
        second.mul_(beta2).addcmul_(by_modality, by_modality, value=1 - beta2)
        size = second.sqrt().div_((1 - beta2 ** state["step"]) ** 0.5).add_(group["eps"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_((first / size).sum(0), alpha=-group["lr"] / (1 - beta1 ** state["step"]))


@torch.no_grad()
def orthogonalize(model: EarlyFusionTransformer, skip: Tensor) -> None:
    """Replace each W of attention by ``U V^T |W| / |U V^T|`` with ``W = U S V^T`` (arXiv 2602.01734, Algorithm 1),
    unless ``skip`` is true."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and any(part in ("w_q", "w_k", "w_v", "w_o") for part in name.split(".")):
            module.weight.copy_(torch.where(skip, module.weight, orthogonal(module.weight)))


def orthogonal(weight: Tensor) -> Tensor:
    """Return the orthogonal polar factor, scaled to the Frobenius norm of ``weight``; return a non-finite matrix
    unchanged."""
    wide = weight.float()
    if not wide.isfinite().all():
        return weight
    u, _, vt = torch.linalg.svd(wide, full_matrices=False)
    sign = u @ vt
    return (sign * (wide.norm() / sign.norm())).to(weight.dtype)
