"""AdamW with separate moments for each modality, so that one modality's gradients do not scale another's step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, optim

from mmqk.distributed import summed, world_size
from mmqk.training.step.matrix_optimizers import closure_loss, unless


class SplitAdamW(optim.Optimizer):
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
        params: Parameters or parameter groups; a group may set `weight_decay` (decoupled, as in torch).
        lr: Learning rate.
        betas: Decay of the moments.
        eps: Added to each square root of a second moment.
        weight_decay: Weight decay of groups that do not set it.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
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
    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale every modality's gradients by torch's clipping factor; ``norm`` is the norm of their sum."""
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for by_modality in self._gradients.values():
            by_modality.mul_(factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, summed and by modality."""
        super().zero_grad(set_to_none)
        self._gradients.clear()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the gradients of `backward`. A parameter without a gradient is unchanged, as in AdamW.

        If ``found_inf`` is set and true, no parameter changes, but the moments may change.
        """
        result = closure_loss(closure)
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            for p in (p for p in group["params"] if p in self._gradients):
                before = p if found_inf is None else p.clone()
                self._update(p, self._gradients[p], group)
                p.copy_(unless(found_inf, before, p))  # without found_inf, p.copy_(p) does nothing
        return result

    def _update(self, p: Tensor, by_modality: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = (
                torch.zeros_like(by_modality),
                torch.zeros_like(by_modality),
            )
        state["step"] += 1
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.lerp_(by_modality, 1 - beta1)
        second.mul_(beta2).addcmul_(by_modality, by_modality, value=1 - beta2)
        size = second.sqrt().div_((1 - beta2 ** state["step"]) ** 0.5).add_(group["eps"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_((first / size).sum(0), alpha=-group["lr"] / (1 - beta1 ** state["step"]))
