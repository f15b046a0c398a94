"""Measures optimizer steps: the radial budget, sizes of gradients and updates, and gradients relative to Adam's v.

The training module calls a `StepMonitor` during a step. The monitor does not change training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mmqk.model import EarlyFusionTransformer
from mmqk.monitors.formulas.gradients import below_epsilon, gradient_over_second_moment, update_size
from mmqk.monitors.own.window import BudgetWindow
from mmqk.monitors.probe import block_matrices
from mmqk.store.tags import tag

if TYPE_CHECKING:
    from mmqk.config import MonitorConfig


class StepMonitor:
    """Measures the steps that the configuration selects; `after_step`, `close` and `sizes` return the numbers.

    Args:
        model: the trained model.
        config: the configuration of the monitors.
        max_steps: number of steps of the run. The last step is measured, in addition to every ``every_n_steps``-th.
        trained: indices of the modalities whose loss is trained; if empty, the budget has no parts by modality.
        low_precision: whether the weights are in bf16, so that small updates leave them unchanged. Their share is
            then measured even if ``config.parameters`` is false.
    """

    def __init__(
        self,
        model: EarlyFusionTransformer,
        config: MonitorConfig,
        max_steps: int,
        trained: list[int],
        low_precision: bool = False,
    ) -> None:
        self.model, self.config, self.max_steps, self.trained = model, config, max_steps, trained
        self.low_precision = low_precision
        self.window: BudgetWindow | None = None
        self.named: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self.matrices: dict[Tensor, str] = {
            weight: tag(f"{name}_grad_over_v", *modality, layer=layer)
            for name, modality, layer, weight in block_matrices(model)
        }
        self.matrices[model.head.weight] = "head_grad_over_v"
        self.matrices[model.embed.weight] = "embed_grad_over_v"  # replaces the name of a tied head
        self._in_window = False  # whether this step is part of the window
        self._probe_due = False
        self._before: dict[Tensor, tuple[Tensor, float]] = {}
        self._sizes: dict[str, Tensor] = {}

    # During a step

    def before_step(self, step: int) -> None:
        """Start to measure step number ``step``, counted from 1. Call this before each micro-batch of the step."""
        c = self.config
        if c.budget_every_n_steps and self.window is None and (step - 1) % c.budget_every_n_steps == 0:
            self.window = BudgetWindow(self.model, self.trained)
        self._in_window = self.window is not None
        every = c.every_n_steps
        self._probe_due = bool(every) and (step % every == 0 or step == self.max_steps)

    @property
    def attributing(self) -> bool:
        """Whether this step needs `before_backward`."""
        return self._in_window and bool(self.trained)

    def before_backward(self, parts_M: Tensor) -> None:
        """Compute the gradients by modality, without freeing the graph. Call this before the backward pass.

        ``parts_M`` is the part of each modality in the micro-batch's loss.
        """
        if self.window is not None:
            self.window.add_gradients(parts_M)

    def before_update(self, optimizer: Optimizer, factor: Tensor | None, grad_norms: Mapping[str, Tensor]) -> None:
        """Store the weights before the update. Call this after gradients are clipped by ``factor``.

        ``grad_norms`` are the norms before clipping, by parameter.
        """
        if self.window is not None:
            self.window.before_update(optimizer, factor)
        if self._probe_due and (self.config.parameters or self.low_precision):
            self._before = {
                p: (p.detach().clone(), group["lr"])
                for group in optimizer.param_groups
                for p in group["params"]
                if p in self.named
            }
        if self._probe_due and self.config.parameters:
            self._sizes = {tag("grad_norm", name): norm for name, norm in grad_norms.items()}

    def after_update(self, optimizer: Optimizer) -> None:
        """Measure the optimizer's update. Call this right after the update, before QK-Clip and the power step."""
        if self.window is not None:
            self.window.after_update(optimizer)
        if self._probe_due:
            groups = {p: group for group in optimizer.param_groups for p in group["params"]}
            self._measure_updates(optimizer, groups)
            if self.config.second_moment:
                self._measure_gradients(optimizer, groups)

    @torch.no_grad()
    def _measure_gradients(self, optimizer: Optimizer, groups: Mapping[Tensor, dict[str, Any]]) -> None:
        for p, name in self.matrices.items():
            state = optimizer.state.get(p)
            if state and p.grad is not None:
                group, step = groups[p], torch.as_tensor(state["step"], dtype=torch.float32)
                self._sizes[name] = gradient_over_second_moment(
                    p.grad, state["exp_avg_sq"], step, group["betas"][1], group["eps"]
                )

    @torch.no_grad()
    def _measure_updates(self, optimizer: Optimizer, groups: Mapping[Tensor, dict[str, Any]]) -> None:
        if self._before:
            unchanged = torch.stack([(before == p).sum() for p, (before, _) in self._before.items()]).sum()
            self._sizes["update_unchanged"] = unchanged / sum(p.numel() for p in self._before)
        for p, (before, lr) in self._before.items() if self.config.parameters else ():
            state, group, name = optimizer.state.get(p), groups[p], self.named[p]
            if not state:
                continue  # no loss has depended on this parameter yet
            over_lr, relative = update_size(before, p.detach(), lr)
            step = torch.as_tensor(state["step"], dtype=torch.float32)
            share = below_epsilon(state["exp_avg_sq"], step, group["betas"][1], group["eps"])
            self._sizes |= {
                tag("update_rms", name): over_lr,
                tag("update_ratio", name): relative,
                tag("adam_below_eps", name): share,
            }
        self._before = {}

    # After a step

    def after_step(self) -> dict[str, float]:
        """Return the numbers by tag of the window that ends with this step; empty if none ends."""
        if self.window is None or not self._in_window:
            return {}
        self.window.settle()
        self._in_window = False
        return self.close() if self.window.steps == self.config.budget_steps else {}

    def close(self) -> dict[str, float]:
        """End the open window and return its numbers; ``budget_window`` is its number of steps."""
        window, self.window = self.window, None
        return window.values() if window is not None and window.steps else {}

    def sizes(self) -> dict[str, float]:
        """Return and clear the sizes of gradients and updates of the last measured step.

        A parameter that was all zeros before the step, such as a gain stored as an offset, has no `update_ratio`.
        """
        measured, self._sizes = self._sizes, {}
        if not measured:
            return {}
        device = next(iter(measured.values())).device
        numbers = torch.stack([value.float().to(device) for value in measured.values()]).tolist()
        sizes = dict(zip(measured, numbers, strict=True))
        for name in self.named.values():
            ratio, size = tag("update_ratio", name), tag("update_rms", name)
            if ratio in sizes and math.isfinite(sizes[size]) and not math.isfinite(sizes[ratio]):
                del sizes[ratio]
        return sizes

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the open window; empty if no window is open."""
        return {} if self.window is None or not self.window.steps else {"window": self.window.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the window of a `state_dict`."""
        if "window" in state:
            self.window = BudgetWindow(self.model, self.trained)
            self.window.load_state_dict(state["window"])
