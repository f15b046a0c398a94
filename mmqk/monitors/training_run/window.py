"""The radial budget of W_q and W_k over a window of a run's optimizer steps. M modalities."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mmqk.distributed import summed
from mmqk.model import EarlyFusionTransformer
from mmqk.model.transformer import Block
from mmqk.monitors.measures.budget import AdamUpdate, RadialBudget
from mmqk.store.tags import tag

MATRICES = ("w_q", "w_k")
SETTINGS = ("lr", "betas", "eps", "weight_decay")


def watched_matrices(model: EarlyFusionTransformer) -> dict[tuple[str, int], list[nn.Parameter]]:
    """The weights behind W_q and W_k of each layer: one, or one for each modality; under σReparam the raw weight."""
    return {
        (name, layer): [
            cast(nn.Parameter, m.weight)
            for m in getattr(attention, name).modules()
            if isinstance(m, nn.Linear)
        ]
        for name in MATRICES
        for layer, attention in enumerate(cast(Block, block).attention for block in model.blocks)
    }


class BudgetWindow:
    """`RadialBudget` of every W_q and W_k. Each optimizer step calls, in this order:

    `add_gradients` (each micro-batch, before its backward pass), `before_update`, `after_update`, `settle`.

    The modality of a gradient is that of the target. Nothing synchronizes with the host or writes ``.grad``.
    Changes after the optimizer's update (QK-Clip) are in `rest`, so that the parts sum to the measured change; `step`
    is the optimizer's update only.

    Args:
        model: the trained model.
        trained: indices of the modalities whose loss is trained.
    """

    def __init__(self, model: EarlyFusionTransformer, trained: list[int]) -> None:
        self.names, self.trained = model.config.modalities, trained
        self.matrices = watched_matrices(model)
        self.parameters = [p for weights in self.matrices.values() for p in weights]
        self.budgets: list[RadialBudget] = []
        self.steps = 0
        self.clip_sum: Tensor | float = 0.0
        self.there_M: Tensor | None = None  # modalities with a part in the loss
        self._gradients: list[dict[int, Tensor]] = [{} for _ in self.parameters]
        self._factor: Tensor | float = 1.0
        self._before: list[Tensor] = []
        self._squares: list[Tensor] = []
        self._groups: dict[Tensor, dict[str, Any]] = {}

    def add_gradients(self, parts_M: Tensor) -> None:
        """Add the gradients of all modalities but the last, and keep the graph for the backward pass.

        The last modality's gradient is the whole gradient minus the others.
        """
        self._met(parts_M.detach() != 0)
        for m in self.trained[:-1]:
            gradients = torch.autograd.grad(parts_M[m], self.parameters, retain_graph=True, allow_unused=True)
            for sums, gradient in zip(self._gradients, gradients, strict=True):
                if gradient is not None:
                    sums[m] = gradient if m not in sums else sums[m] + gradient

    @torch.no_grad()
    def before_update(self, optimizer: Optimizer, factor: Tensor | None) -> None:
        """Store the weights; ``factor`` is the scale of gradient clipping, None without clipping."""
        self._factor = 1.0 if factor is None else factor.double()
        if not self.budgets:
            for p in self.parameters:
                moment = optimizer.state.get(p, {}).get("exp_avg")
                shared = moment is not None and moment.shape == p.shape
                self.budgets.append(RadialBudget(moment.clone() if shared else None, len(self.names)))
        self._before = [p.detach().clone() for p in self.parameters]
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        self._groups = {p: {k: groups[p][k] for k in SETTINGS} for p in self.parameters}

    @torch.no_grad()
    def after_update(self, optimizer: Optimizer) -> None:
        """Add the optimizer's update, before anything else changes the weights."""
        for budget, p, before, gradients in zip(
            self.budgets, self.parameters, self._before, self._gradients, strict=True
        ):
            state = optimizer.state.get(p)
            if not state:
                continue  # no loss has depended on it yet
            step = torch.as_tensor(state["step"], dtype=torch.float64)
            shared = state["exp_avg"].shape == p.shape
            update = AdamUpdate(before, p.detach(), state["exp_avg_sq"], step, **self._groups[p])
            if shared:
                budget.add(self._by_modality(p, gradients), update)
            else:
                self._add_split(budget, update, state["exp_avg"])
        self.steps += 1
        self.clip_sum = self.clip_sum + self._factor
        self._squares = [p.detach().double().square().sum() for p in self.parameters]
        self._gradients = [{} for _ in self.parameters]
        self._before = []
        if self.there_M is not None:
            self.there_M = summed(self.there_M.long()) > 0  # other ranks may have other modalities

    def _by_modality(self, p: Tensor, summed_by_m: dict[int, Tensor]) -> list[Tensor | None]:
        """Clipped fp64 gradients over all ranks; they sum to the optimizer's gradient."""
        gradients: list[Tensor | None] = [None] * len(self.names)
        rest = None if p.grad is None else p.grad.double()
        for m, gradient in summed_by_m.items():
            clipped = self._factor * summed(gradient).double()
            gradients[m], rest = clipped, None if rest is None else rest - clipped
        if self.trained:
            gradients[self.trained[-1]] = rest
        return gradients

    def _add_split(self, budget: RadialBudget, update: AdamUpdate, moments: Tensor) -> None:
        """Add a step of SplitAdamW, whose state has each modality's moment, so that nothing is unattributed.

        The steps are passed to the budget as gradients of an optimizer with betas 0, v = 0 and epsilon 1.
        """
        beta1, beta2 = update.betas
        root_v = (update.second_moment.double() / (1 - beta2**update.step)).sqrt()
        steps = moments.double() / (1 - beta1**update.step) / (root_v + update.eps)
        gradients: list[Tensor | None] = [None] * len(self.names)
        there_M = torch.zeros(len(self.names), dtype=torch.bool, device=steps.device)
        for place, m in enumerate(self.trained):
            gradients[m] = steps[place]
            there_M[m] = (steps[place] != 0).any()
        self._met(there_M)
        as_gradients = AdamUpdate(
            before=update.before,
            after=update.after,
            second_moment=torch.zeros_like(update.before),
            step=1,
            lr=update.lr,
            betas=(0.0, 0.0),
            eps=1.0,
            weight_decay=update.weight_decay,
        )
        budget.add(gradients, as_gradients)

    def _met(self, there_M: Tensor) -> None:
        self.there_M = there_M if self.there_M is None else self.there_M | there_M

    @torch.no_grad()
    def settle(self) -> None:
        """Add the changes since the optimizer's update to `rest`."""
        for budget, p, square in zip(self.budgets, self.parameters, self._squares, strict=True):
            more = p.detach().double().square().sum() - square
            budget.rest, budget.total = budget.rest + more, budget.total + more
        self._squares = []

    def values(self) -> dict[str, float]:
        """The window's sums by tag, over all copies of a layer's matrix; a modality without a part in the loss has no
        key."""
        assert self.there_M is not None
        present = self.there_M.tolist()
        tags: list[str] = []
        values: list[Tensor] = []
        budgets = iter(self.budgets)
        for (name, layer), weights in self.matrices.items():
            of_matrix = [next(budgets) for _ in weights]
            for m in (m for m, n in enumerate(present) if n):
                modality = self.names[m]
                tags.append(tag(f"{name}_growth", modality, layer=layer))
                values.append(_sum([b.by_modality[m] for b in of_matrix], weights[0]))
            for part in ("decay", "step", "unattributed", "rest", "total"):
                tags.append(tag(f"{name}_growth_{part}", layer=layer))
                values.append(_sum([getattr(b, part) for b in of_matrix], weights[0]))
            tags.append(tag(f"{name}_sq", layer=layer))
            values.append(_sum([p.detach().double().square().sum() for p in weights], weights[0]))
        tags.append("budget_clip_factor")
        values.append(_sum([torch.as_tensor(self.clip_sum)], values[0]) / self.steps)
        return dict(zip(tags, torch.stack(values).tolist(), strict=True)) | {"budget_window": self.steps}

    def state_dict(self) -> dict[str, Any]:
        """The state between two steps, for the rest of the window."""
        state = {"steps": self.steps, "clip_sum": self.clip_sum, "there_M": self.there_M}
        return state | {"budgets": [dict(vars(b)) for b in self.budgets]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        device = self.parameters[0].device
        self.steps = state["steps"]
        self.clip_sum, self.there_M = (_moved(state[name], device) for name in ("clip_sum", "there_M"))
        self.budgets = []
        for p, saved in zip(self.parameters, state["budgets"], strict=True):
            budget = RadialBudget(None, len(self.names))
            vars(budget).update({name: _moved(value, p.device) for name, value in saved.items()})
            self.budgets.append(budget)


def _sum(values: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack([v.to(like.device, torch.float64) for v in values]).sum()


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_moved(v, device) for v in value]
    return value.to(device) if isinstance(value, Tensor) else value
