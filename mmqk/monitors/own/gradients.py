"""Gradients by modality: the radial budget of W_q and W_k over a window of optimizer steps, and the agreement of the
modalities' gradients from separate passes over the two halves of a batch.

Shapes: M modalities.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from mmqk.data.batch import TokenBatch
from mmqk.distributed import rank, summed
from mmqk.model import EarlyFusionTransformer
from mmqk.model.transformer import Block, evaluation_mode
from mmqk.monitors.formulas.reduce import selection
from mmqk.monitors.formulas.weights import AdamUpdate, Gradients, HalfProducts, RadialBudget, half_products
from mmqk.store.metrics import tag

MOVED = 1e-4  # of the norm of the weights, for the differences of `sharpness`
SETTINGS = ("lr", "betas", "eps", "weight_decay", "fixed_norm", "update_clip")


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
        self.budgets: list[RadialBudget] = []
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
                self.budgets.append(RadialBudget(moment.clone() if shared else None, len(self.names)))
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
            update = AdamUpdate(before, p.detach(), state["exp_avg_sq"], step, **settings)
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

    def _add_split(self, budget: RadialBudget, update: AdamUpdate, moments: Tensor) -> None:
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
        self.budgets = [RadialBudget(None, len(self.names)) for _ in self.parameters]
        for budget, saved in zip(self.budgets, state["budgets"], strict=True):
            vars(budget).update(saved)


def _sum(values: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack([v.to(like.device, torch.float64) for v in values]).sum()


# Returns the part of a batch's loss from each modality's targets, (M,), divided by the batch's `step_targets`.
LossParts = Callable[[TokenBatch], Tensor]


def gradient_agreement(model: EarlyFusionTransformer, batch: TokenBatch, loss_parts: LossParts) -> dict[str, float]:
    """Return, by tag, the cosine, signal and noise of the modalities' gradients by layer and over all parameters.

    The halves are the even and the odd sequences, numbered over all ranks; every rank has a batch of equal size. The
    call runs in evaluation mode (so without dropout), does not write ``.grad``, and is collective with several ranks.
    It costs a forward pass for each half, and for each half and modality a backward pass and the memory of all
    gradients.

    A modality without a target in one of the halves is left out, and so is a cosine that is NaN
    (`HalfProducts.cosine`).

    Args:
        model: its parameters ``blocks.N...`` belong to layer N.
        batch: has at least 2 sequences.
        loss_parts: returns the loss of each modality's targets, computed with ``model`` as in training.

    Raises:
        ValueError: the batch has one sequence.
    """
    if len(batch.ids_BT) < 2:
        raise ValueError("monitor.gradient_agreement needs two sequences in a micro-batch: raise data.batch_size.")
    names = model.config.modalities
    before = rank() * len(batch.ids_BT)  # number of sequences on the ranks before this one

    def every_other(start: int) -> TokenBatch:
        return batch._map(lambda t: t[(before + start) % 2 :: 2] if t.ndim else t)

    halves = [every_other(0), every_other(1)]
    counts_2M = [
        summed(selection(half.target_modality_BT, half.target_mask_BT, len(names)).sum((1, 2))) for half in halves
    ]
    present = (torch.stack(counts_2M) > 0).all(0).nonzero()[:, 0].tolist()
    if not present:
        return {}
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    with evaluation_mode(model):
        gradients = [  # by half, then modality
            _gradients(loss_parts(replace(half, step_targets=count_M.sum())), present, [p for _, p in parameters])
            for half, count_M in zip(halves, counts_2M, strict=True)
        ]
    groups: dict[int | None, list[int]] = {}
    for i, (name, _) in enumerate(parameters):
        groups.setdefault(int(name.split(".")[1]) if name.startswith("blocks.") else None, []).append(i)
    products = {
        layer: half_products(
            [tuple([half[m][i] for i in group] for half in gradients) for m in range(len(present))]  # type: ignore[misc]
        )
        for layer, group in groups.items()
    }
    return _by_tag(products, [names[m] for m in present])


@torch.no_grad()
def sharpness(model: EarlyFusionTransformer, optimizer: Optimizer, loss: Callable[[], Tensor]) -> dict[str, float]:
    """Return by tag the curvature of a loss along Adam's step, times the learning rate.

    It is ``g^T P H g / |g|^2`` with the gradient g, the Hessian H and ``P = lr / ((1 - beta1^t) (sqrt(v_hat) + eps))``.
    Without momentum a quadratic loss grows if it is above 2, and with momentum above ``2 (1 + beta1) / (1 - beta1)``
    (arXiv 2506.04805). ``H g`` is the difference of two gradients at weights moved by `MOVED` of their norm, so the
    call costs three forward and backward passes. It runs in evaluation mode and restores the weights. It returns
    nothing if a parameter has no second moment of Adam yet, or is not in fp32.

    Args:
        model: the model of the loss.
        optimizer: Adam or AdamW of its parameters, after at least one step.
        loss: computes the loss with the weights of the model.
    """
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    moved = [p for p in model.parameters() if p in groups]
    moments = [optimizer.state.get(p, {}).get("exp_avg_sq") for p in moved]
    if any(v is None or v.shape != p.shape or p.dtype.itemsize < 4 for p, v in zip(moved, moments, strict=True)):
        return {}

    def gradient() -> list[Tensor]:
        with torch.enable_grad():
            return list(torch.autograd.grad(loss(), moved, materialize_grads=True))

    kept = [p.detach().clone() for p in moved]
    with evaluation_mode(model):
        grads = gradient()
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        size = MOVED * torch.stack([p.square().sum() for p in kept]).sum().sqrt()
        ends = []
        for sign in (1, -1):
            for p, before, g in zip(moved, kept, grads, strict=True):
                p.copy_(before + sign * size / norm * g)
            ends.append(gradient())
        for p, before in zip(moved, kept, strict=True):
            p.copy_(before)
    total = norm.new_zeros(())
    for p, v, g, after, other in zip(moved, moments, grads, *ends, strict=True):
        (beta1, beta2), t = groups[p]["betas"], optimizer.state[p]["step"]
        root_v = (v / (1 - beta2**t)).sqrt() + groups[p]["eps"]
        total += (groups[p]["lr"] / (1 - beta1**t) * g / root_v * (after - other)).sum()
    return {"sharpness": float(total / (2 * size * norm))}


def _gradients(parts_M: Tensor, present: list[int], parameters: list[Tensor]) -> list[Gradients]:
    gradients: list[Gradients] = []
    for m in present:
        of_modality = torch.autograd.grad(parts_M[m], parameters, retain_graph=m != present[-1], materialize_grads=True)
        gradients.append([summed(g) for g in of_modality])
    return gradients


def _by_tag(products: dict[int | None, HalfProducts], names: list[str]) -> dict[str, float]:
    """Return the agreement of each layer and, without a layer in the tag, of all parameters."""
    total = sum(list(products.values())[1:], next(iter(products.values())))
    groups = {layer: product for layer, product in products.items() if layer is not None} | {None: total}
    by_tag: dict[str, Tensor] = {}
    for layer, product in groups.items():
        for statistic, values in (("grad_signal", product.signal), ("grad_noise", product.noise)):
            by_tag |= {tag(statistic, name, layer=layer): values[m] for m, name in enumerate(names)}
        cosine_MM = product.cosine
        for (m, name), (n, other) in combinations(enumerate(names), 2):
            by_tag[tag("grad_agreement", name, other, layer=layer)] = cosine_MM[m, n]
    numbers = dict(zip(by_tag, torch.stack([*by_tag.values()]).tolist(), strict=True))  # one transfer
    return {t: x for t, x in numbers.items() if not (t.startswith("grad_agreement") and math.isnan(x))}
