"""The radial budget of W_q and W_k over a window of a run's own optimizer steps. M modalities."""

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
    """The weights behind W_q and W_k of each layer: one, or a copy for every modality; under σReparam the raw one."""
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
    """`RadialBudget` of every W_q and W_k, fed by a step in this order, once for each optimizer step:

    `add_gradients` (each micro-batch, before its backward pass), `before_update`, `after_update`, `settle`.

    The modality is that of the target whose loss is followed back. Nothing is synchronised with the host, and no
    gradient goes into ``.grad``. What changes the weights after the optimizer's update (QK-Clip) is whole in `rest`,
    so that the parts sum to the measured change; `step` is the optimizer's own.

    Args:
        model: the one that is trained.
        trained: places of the modalities whose loss is not switched off.
    """

    def __init__(self, model: EarlyFusionTransformer, trained: list[int]) -> None:
        self.names, self.trained = model.config.modalities, trained
        self.matrices = watched_matrices(model)
        self.parameters = [p for own in self.matrices.values() for p in own]
        self.budgets: list[RadialBudget] = []
        self.steps = 0
        self.clip_sum: Tensor | float = 0.0
        self.there_M: Tensor | None = None  # modalities that had a part in the loss
        self._gradients: list[dict[int, Tensor]] = [{} for _ in self.parameters]
        self._factor: Tensor | float = 1.0
        self._before: list[Tensor] = []
        self._squares: list[Tensor] = []
        self._groups: dict[Tensor, dict[str, Any]] = {}

    def add_gradients(self, parts_M: Tensor) -> None:
        """Follow the parts of the loss back to the matrices, all but one; the graph stays for the backward pass.

        The last modality's gradient is what the whole gradient has beyond the others.
        """
        self._met(parts_M.detach() != 0)
        for m in self.trained[:-1]:
            found = torch.autograd.grad(parts_M[m], self.parameters, retain_graph=True, allow_unused=True)
            for own, gradient in zip(self._gradients, found, strict=True):
                if gradient is not None:
                    own[m] = gradient if m not in own else own[m] + gradient

    @torch.no_grad()
    def before_update(self, optimizer: Optimizer, factor: Tensor | None) -> None:
        """Remember the weights; ``factor`` is what clipping scaled the step's gradients by, None without it."""
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
        """Count what the optimizer did, before anything else touches the weights."""
        for budget, p, before, gradients in zip(
            self.budgets, self.parameters, self._before, self._gradients, strict=True
        ):
            state = optimizer.state.get(p)
            if not state:
                continue  # no loss has ever reached it
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
            self.there_M = summed(self.there_M.long()) > 0  # the batches of other ranks have others

    def _by_modality(self, p: Tensor, known: dict[int, Tensor]) -> list[Tensor | None]:
        """Clipped, in fp64, of all ranks; they sum to the gradient that the optimizer took."""
        gradients: list[Tensor | None] = [None] * len(self.names)
        rest = None if p.grad is None else p.grad.double()
        for m, gradient in known.items():
            clipped = self._factor * summed(gradient).double()
            gradients[m], rest = clipped, None if rest is None else rest - clipped
        if self.trained:
            gradients[self.trained[-1]] = rest
        return gradients

    def _add_split(self, budget: RadialBudget, update: AdamUpdate, moments: Tensor) -> None:
        """SplitAdamW: each modality's step stands in its state, and nothing is left unattributed.

        Given to the budget as gradients of an optimizer without memory whose root of v is 0 and epsilon 1.
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
        known = AdamUpdate(
            before=update.before,
            after=update.after,
            second_moment=torch.zeros_like(update.before),
            step=1,
            lr=update.lr,
            betas=(0.0, 0.0),
            eps=1.0,
            weight_decay=update.weight_decay,
        )
        budget.add(gradients, known)

    def _met(self, there_M: Tensor) -> None:
        self.there_M = there_M if self.there_M is None else self.there_M | there_M

    @torch.no_grad()
    def settle(self) -> None:
        """After everything that follows the update: what that changed is part of `rest`."""
        for budget, p, square in zip(self.budgets, self.parameters, self._squares, strict=True):
            more = p.detach().double().square().sum() - square
            budget.rest, budget.total = budget.rest + more, budget.total + more
        self._squares = []

    def values(self) -> dict[str, float]:
        """The window's sums by tag, copies of a layer's matrix together; a modality without a part in the loss is an
        absent key."""
        assert self.there_M is not None
        there = self.there_M.tolist()
        tags: list[str] = []
        values: list[Tensor] = []
        budgets = iter(self.budgets)
        for (name, layer), own in self.matrices.items():
            of_it = [next(budgets) for _ in own]
            for m in (m for m, n in enumerate(there) if n):
                modality = self.names[m]
                tags.append(tag(f"{name}_growth", modality, layer=layer))
                values.append(_sum([b.by_modality[m] for b in of_it], own[0]))
            for part in ("decay", "step", "unattributed", "rest", "total"):
                tags.append(tag(f"{name}_growth_{part}", layer=layer))
                values.append(_sum([getattr(b, part) for b in of_it], own[0]))
            tags.append(tag(f"{name}_sq", layer=layer))
            values.append(_sum([p.detach().double().square().sum() for p in own], own[0]))
        tags.append("budget_clip_factor")
        values.append(_sum([torch.as_tensor(self.clip_sum)], values[0]) / self.steps)
        return dict(zip(tags, torch.stack(values).tolist(), strict=True)) | {"budget_window": self.steps}

    def state_dict(self) -> dict[str, Any]:
        """Between two steps: all that the rest of the window needs."""
        own = {"steps": self.steps, "clip_sum": self.clip_sum, "there_M": self.there_M}
        return own | {"budgets": [dict(vars(b)) for b in self.budgets]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
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
