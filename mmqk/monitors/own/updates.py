"""Measures the optimizer's updates of mmqk's own model, from inside a step of its training module.

`UpdateMonitor` measures the radial budget of W_q and W_k over a window of steps (`BudgetWindow`), and at the step of a
probe the sizes of gradients and updates and the gradients relative to Adam's v. It does not change training.

Shapes: M modalities.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from mmqk.distributed import summed
from mmqk.model import EarlyFusionTransformer
from mmqk.model.transformer import Block
from mmqk.monitors.formulas import weights as formulas
from mmqk.monitors.own.probe import block_matrices
from mmqk.store.metrics import tag

if TYPE_CHECKING:
    from mmqk.config.training import MonitorConfig

SETTINGS = ("lr", "betas", "eps", "weight_decay", "fixed_norm", "update_clip")


def probe_is_due(config: MonitorConfig, step: int, max_steps: int) -> bool:
    """Return whether the run is probed after this step."""
    every = config.every_n_steps
    return every > 0 and (step % every == 0 or step == max_steps or step in config.at)


class UpdateMonitor:
    """Measures the steps that the configuration selects; `after_step`, `close` and `sizes` return the numbers.

    Args:
        model: the trained model.
        config: the configuration of the monitors.
        max_steps: number of steps of the run; the last step is measured too.
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
        self._probe_due = False
        self._before: dict[Tensor, tuple[Tensor, float]] = {}
        self._sizes: dict[str, Tensor] = {}

    # During a step

    def before_step(self, step: int) -> None:
        """Start to measure step number ``step``, counted from 1. Call this before each micro-batch of the step."""
        c = self.config
        if c.budget_every_n_steps and self.window is None and (step - 1) % c.budget_every_n_steps == 0:
            self.window = BudgetWindow(self.model, self.trained)
        self._probe_due = probe_is_due(c, step, self.max_steps)

    @property
    def attributing(self) -> bool:
        """Whether the window of this step needs the gradients by modality, computed before the backward pass."""
        return self.window is not None and bool(self.trained)

    def before_update(self, optimizer: Optimizer, factor: Tensor | None, grad_norms: Mapping[str, Tensor]) -> None:
        """Store the weights before the update. Call this after gradients are clipped by ``factor``.

        ``grad_norms`` are the norms before clipping, by parameter.
        """
        if self.window is not None:
            self.window.before_update(optimizer, factor)
        if self._probe_due and (self.config.parameters or self.low_precision):
            rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
            self._before = {p: (p.detach().clone(), lr) for p, lr in rates.items() if p in self.named}
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
                self._sizes[name] = formulas.gradient_over_second_moment(
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
            over_lr, relative = formulas.update_size(before, p.detach(), lr)
            step = torch.as_tensor(state["step"], dtype=torch.float32)
            share = formulas.below_epsilon(state["exp_avg_sq"], step, group["betas"][1], group["eps"])
            self._sizes |= {
                tag("update_rms", name): over_lr,
                tag("update_ratio", name): relative,
                tag("adam_below_eps", name): share,
            }
        layers = watched_matrices(self.model) if self._before and self.config.parameters else {}
        for layer, (q, *others) in ((layer, weights) for (name, layer), weights in layers.items() if name == "w_q"):
            k = layers["w_k", layer][0]
            if not others and q in self._before and k in self._before:  # not a copy for each modality
                head_dim = self.model.config.head_dim
                ranks_H = formulas.product_update_rank(self._before[q][0], q, self._before[k][0], k, head_dim)
                self._sizes[tag("qk_update_rank", layer=layer)] = ranks_H.amin()
        self._before = {}

    # After a step

    def after_step(self) -> dict[str, float]:
        """Return the numbers by tag of the window that ends with this step; empty if none ends."""
        if self.window is None:
            return {}
        self.window.settle()
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


def watched_matrices(model: EarlyFusionTransformer) -> dict[tuple[str, int], list[nn.Parameter]]:
    """Return the weights of W_q and W_k in each layer: one shared weight, or one for each modality. Under
    σReparam these are the raw weights."""
    return {
        (name, layer): [
            cast(nn.Parameter, m.weight) for m in getattr(attention, name).modules() if isinstance(m, nn.Linear)
        ]
        for name in ("w_q", "w_k")
        for layer, attention in enumerate(cast(Block, block).attention for block in model.blocks)
    }


class BudgetWindow:
    """Computes the `RadialBudget` of every W_q and W_k.

    Each optimizer step calls, in this order: `add_gradients` (for each micro-batch, before its backward pass),
    `before_update`, `after_update`, `settle`.

    The modality of a gradient is that of the targets whose loss it comes from. The window neither synchronizes with
    the host nor writes ``.grad``. Changes after the optimizer's update (QK-Clip) count in `rest`, so the parts sum to
    the measured change; `step` covers only the optimizer's update.

    Args:
        model: the trained model.
        trained: indices of the modalities whose loss is trained; if empty, there are no parts by modality.
    """

    def __init__(self, model: EarlyFusionTransformer, trained: list[int]) -> None:
        self.names, self.trained = model.config.modalities, trained
        self.matrices = watched_matrices(model)
        self.parameters = [p for weights in self.matrices.values() for p in weights]
        self.budgets: list[formulas.RadialBudget] = []
        self.steps = 0
        self.clip_sum: Tensor | float = 0.0
        self.present_M: Tensor | None = None  # whether each modality has a part in the loss
        self._gradients: list[dict[int, Tensor]] = [{} for _ in self.parameters]
        self._factor: Tensor | float = 1.0
        self._before: list[Tensor] = []
        self._squares: list[Tensor] = []
        self._settings: dict[Tensor, dict[str, Any]] = {}

    def add_gradients(self, parts_M: Tensor) -> None:
        """Add the gradients of all trained modalities but the last; keep the graph for the backward pass.

        The last modality's gradient is the step's gradient minus these.
        """
        self._add_present(parts_M.detach() != 0)
        for m in self.trained[:-1]:
            gradients = torch.autograd.grad(parts_M[m], self.parameters, retain_graph=True, allow_unused=True)
            for sums, gradient in zip(self._gradients, gradients, strict=True):
                if gradient is not None:
                    sums[m] = gradient if m not in sums else sums[m] + gradient

    @torch.no_grad()
    def before_update(self, optimizer: Optimizer, factor: Tensor | None) -> None:
        """Store the weights; ``factor`` is the factor of gradient clipping, or None if gradients are not clipped."""
        self._factor = 1.0 if factor is None else factor.double()
        if not self.budgets:
            for p in self.parameters:
                moment = optimizer.state.get(p, {}).get("exp_avg")
                shared = moment is not None and moment.shape == p.shape
                self.budgets.append(formulas.RadialBudget(moment.clone() if shared else None, len(self.names)))
        self._before = [p.detach().clone() for p in self.parameters]
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        self._settings = {p: {k: groups[p][k] for k in SETTINGS if k in groups[p]} for p in self.parameters}

    @torch.no_grad()
    def after_update(self, optimizer: Optimizer) -> None:
        """Add the optimizer's update; call it before anything else changes the weights."""
        for budget, p, before, gradients in zip(
            self.budgets, self.parameters, self._before, self._gradients, strict=True
        ):
            state = optimizer.state.get(p)
            if not state:
                continue  # no loss has depended on this parameter yet
            settings = self._settings[p]
            if "exp_avg" not in state:  # the state of Muon
                budget.add_whole(before, p.detach(), settings["lr"] * settings["weight_decay"])
                continue
            step = torch.as_tensor(state["step"], dtype=torch.float64)
            clips = settings.pop("update_clip", False)
            update = formulas.AdamUpdate(before, p.detach(), state["exp_avg_sq"], step, **settings)
            if clips and p.grad is not None:
                # The learning rate of `AdamVariant` with ``update_clip``, which scales both the step and the decay.
                second = update.second_moment.double() / (1 - update.betas[1] ** update.step)
                rms = (p.grad.double().square() / second.clamp_min(update.eps**2)).mean().sqrt()
                update = replace(update, lr=update.lr / rms.clamp_min(1.0))
            if state["exp_avg"].shape == p.shape:
                budget.add(self._clipped(p, gradients), update)
            else:
                self._add_split(budget, update, state["exp_avg"])
        self.steps += 1
        self.clip_sum = self.clip_sum + self._factor
        self._squares = [p.detach().double().square().sum() for p in self.parameters]
        self._gradients = [{} for _ in self.parameters]
        self._before = []
        if self.present_M is not None:
            # Another rank may have a loss of a modality that this rank lacks.
            self.present_M = summed(self.present_M.long()) > 0

    def _clipped(self, p: Tensor, gradients: dict[int, Tensor]) -> list[Tensor | None]:
        """Return the clipped fp64 gradients by modality over all ranks; their sum is the optimizer's gradient."""
        by_modality: list[Tensor | None] = [None] * len(self.names)
        rest = None if p.grad is None else p.grad.double()
        for m, gradient in gradients.items():
            clipped = self._factor * summed(gradient).double()
            by_modality[m], rest = clipped, None if rest is None else rest - clipped
        if self.trained:
            by_modality[self.trained[-1]] = rest
        return by_modality

    def _add_split(self, budget: formulas.RadialBudget, update: formulas.AdamUpdate, moments: Tensor) -> None:
        """Add a step of SplitAdamW, whose state has a moment for each modality, so nothing is unattributed.

        `RadialBudget.add` gets the modalities' steps in place of their gradients; with betas 0, v = 0 and epsilon 1
        it uses them unchanged.
        """
        beta1, beta2 = update.betas
        root_v = (update.second_moment.double() / (1 - beta2**update.step)).sqrt()
        steps = moments.double() / (1 - beta1**update.step) / (root_v + update.eps)
        gradients: list[Tensor | None] = [None] * len(self.names)
        present_M = torch.zeros(len(self.names), dtype=torch.bool, device=steps.device)
        for place, m in enumerate(self.trained):
            gradients[m] = steps[place]
            present_M[m] = (steps[place] != 0).any()
        self._add_present(present_M)
        zeros = torch.zeros_like(update.before)
        budget.add(gradients, replace(update, second_moment=zeros, step=1, betas=(0.0, 0.0), eps=1.0))

    def _add_present(self, present_M: Tensor) -> None:
        self.present_M = present_M if self.present_M is None else self.present_M | present_M

    @torch.no_grad()
    def settle(self) -> None:
        """Add the changes since the optimizer's update to `rest`."""
        for budget, p, square in zip(self.budgets, self.parameters, self._squares, strict=True):
            change = p.detach().double().square().sum() - square
            budget.rest, budget.total = budget.rest + change, budget.total + change
        self._squares = []

    def values(self) -> dict[str, float]:
        """Return the sums of the window by tag.

        The copies of a layer's matrix are added up. Modalities without a part in the loss are left out.
        """
        present_M = [] if self.present_M is None else self.present_M.tolist()
        present = [m for m, has_part in enumerate(present_M) if has_part]
        values: dict[str, Tensor] = {}
        budgets = iter(self.budgets)
        for (name, layer), weights in self.matrices.items():
            copies = [next(budgets) for _ in weights]
            for m in present:
                growth = _sum([budget.by_modality[m] for budget in copies], weights[0])
                values[tag(f"{name}_growth", self.names[m], layer=layer)] = growth
            for part in ("decay", "step", "unattributed", "rest", "total"):
                growth = _sum([getattr(budget, part) for budget in copies], weights[0])
                values[tag(f"{name}_growth_{part}", layer=layer)] = growth
            squares = [p.detach().double().square().sum() for p in weights]
            values[tag(f"{name}_sq", layer=layer)] = _sum(squares, weights[0])
        clip_sum = _sum([torch.as_tensor(self.clip_sum)], next(iter(values.values())))
        values["budget_clip_factor"] = clip_sum / self.steps
        numbers = torch.stack([*values.values()]).tolist()  # one transfer
        return dict(zip(values, numbers, strict=True)) | {"budget_window": self.steps}

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Call this only between two steps, because the state has no unfinished step."""
        state = {"steps": self.steps, "clip_sum": self.clip_sum, "present_M": self.present_M}
        return state | {"budgets": [dict(vars(b)) for b in self.budgets]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        state = tree_map_only(Tensor, lambda x: x.to(self.parameters[0].device), state)
        self.steps, self.clip_sum, self.present_M = state["steps"], state["clip_sum"], state["present_M"]
        self.budgets = [formulas.RadialBudget(None, len(self.names)) for _ in self.parameters]
        for budget, saved in zip(self.budgets, state["budgets"], strict=True):
            vars(budget).update(saved)


def _sum(values: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack([v.to(like.device, torch.float64) for v in values]).sum()
