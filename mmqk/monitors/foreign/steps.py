"""Measures the steps of training: the losses by target modality, and the sizes of gradients and updates by matrix and
layer with gradient clipping.

Shapes: B batch, T tokens, V vocabulary, M modalities.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from mmqk.distributed import summed
from mmqk.monitors.adapters import clean, layer_of, unwrapped
from mmqk.monitors.formulas.reduce import log_z
from mmqk.monitors.formulas.weights import gradient_over_second_moment
from mmqk.monitors.modalities import Modalities
from mmqk.store import UserError, tag

Optimizers = Optimizer | Sequence[Optimizer]
MOST_PENDING = 10  # steps whose losses stay on the device at most
_IGNORED = -100  # a target that torch's cross_entropy leaves out


class Updates:
    """Measures the steps of optimizers while ``due`` is true. It reads weights and gradients and changes none.

    A measured step needs memory for one copy of the weights. Gradient clipping is read at every step, from
    `torch.nn.utils.clip_grad_norm_`.

    Args:
        model: the model; parameters of other modules are left out.
        optimizers: the optimizers of its parameters.

    Raises:
        UserError: no optimizer has a parameter of the model, or FSDP1 shards the parameters.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizers):
        root = unwrapped(model)
        self.names: dict[Tensor, str] = {p: clean(name) for name, p in root.named_parameters()}
        self.due = False
        self.bad_gradient: str | None = None  # the first gradient of the last backward pass that is not finite
        given = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        self.optimizers = [_innermost(optimizer) for optimizer in given]
        if not any(p in self.names for o in self.optimizers for group in o.param_groups for p in group["params"]):
            raise UserError("optimizer has no parameter of the watched model: pass the optimizer of this model")
        if any(hasattr(module, "_fsdp_wrapped_module") for module in root.modules()):
            raise UserError("optimizer is not supported with FullyShardedDataParallel: use fully_shard")
        self._before: dict[Tensor, tuple[Tensor, Tensor]] = {}  # the weights before the step, and grad_sq
        # Parameter, learning rate, and squared norms of the clipped gradient and of the update, factor of clipping and,
        # for a matrix with Adam, `gradient_over_second_moment`.
        self._steps: list[tuple[Tensor, float, list[Tensor]]] = []
        self._clips: list[tuple[list[Tensor], Tensor]] = []  # of this step
        self._factor = torch.ones(())  # of the last step
        self._n_clips, self._clipped = 0, torch.zeros(())
        self._error: Exception | None = None  # of the last measured step
        self._hooks = [o.register_step_pre_hook(self._before_step) for o in self.optimizers]
        self._hooks += [o.register_step_post_hook(self._after_step) for o in self.optimizers]
        _CLIP_LISTENERS.append(self._clip)
        clip_grad._clip_grads_with_norm_ = _clip_and_tell

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        _CLIP_LISTENERS.remove(self._clip)
        if not _CLIP_LISTENERS:
            clip_grad._clip_grads_with_norm_ = _CLIP

    # During a step

    @torch.no_grad()
    def _clip(self, parameters: list[Tensor], max_norm: float, norm: Tensor) -> None:
        if any(p in self.names for p in parameters):
            factor = (max_norm / (_whole(norm) + 1e-6)).clamp(max=1.0)  # as in clip_grad_norm_
            self._clips.append((parameters, factor))
            self._factor, self._n_clips = factor, self._n_clips + 1
            self._clipped = self._clipped.to(factor.device) + (factor < 1)

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self.due:
            scale = getattr(optimizer, "grad_scale", None)  # of a GradScaler, for fused optimizers
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                if p in self.names and p.grad is not None:
                    gradient = _wide(p.grad) if scale is None else _wide(p.grad) / scale.to(p.device)
                    self._before[p] = p.detach().clone(), _whole(gradient.square().sum())

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        try:
            self._measure(optimizer)
        except Exception as error:  # an optimizer may keep anything in its state
            self._error = error
            self._before.clear()

    @torch.no_grad()
    def _measure(self, optimizer: Optimizer) -> None:
        factors: dict[Tensor, Tensor] = {}
        for p, factor in ((p, factor) for parameters, factor in self._clips for p in parameters):
            factors[p] = factors[p] * factor if p in factors else factor
        for group in optimizer.param_groups if self._before else ():
            for p in group["params"]:
                if p not in self._before:
                    continue
                before, grad_sq = self._before.pop(p)
                update_sq = _whole((_wide(p) - _wide(before)).square().sum())
                sizes = [grad_sq, update_sq, factors.get(p, torch.ones_like(grad_sq))]
                state = group | optimizer.state.get(p, {})  # some optimizers count the steps of a group
                moment, betas = state.get("exp_avg_sq"), state.get("betas", ())
                is_adam = moment is not None and moment.shape == p.shape and len(betas) == 2 and "step" in state
                if p.ndim > 1 and is_adam and p.grad is not None and not p.grad.is_sparse:
                    step = torch.as_tensor(state["step"], dtype=torch.float32, device=p.device)
                    sizes.append(_whole(gradient_over_second_moment(p.grad, moment, step, betas[1], state["eps"])))
                self._steps.append((p, float(group.get("lr") or 0), sizes))

    # After a step

    def values(self) -> dict[str, float]:
        """Return the numbers of the last measured step by tag, and forget it; empty if no step was measured.

        Norms of gradients are those before clipping. ``clip_share`` is the share of clipped steps since the last
        numbers. An error of the measured step is raised here, because one in a hook would end the training.
        """
        steps, self._steps, error, self._error = self._steps, [], self._error, None
        self._clips = []  # also of a step that a GradScaler has skipped
        if error is not None:
            raise error
        if not steps:
            return {}
        tensors = [x for _, _, sizes in steps for x in sizes] + [self._factor, self._clipped]
        numbers = iter(torch.stack([x.to(tensors[0]) for x in tensors]).tolist())  # one transfer
        values: dict[str, float] = {}
        groups: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        squares: dict[str, float] = {}
        group_of = _groups([self.names[p] for p, _, _ in steps])
        for p, lr, sizes in steps:
            name = self.names[p]
            grad_sq, update_sq, factor, *over_v = (next(numbers) for _ in sizes)
            squares[name] = grad_sq = grad_sq / factor**2 if factor else math.nan
            for total in (groups[group_of[name]], groups[""]):
                total[0] += grad_sq
                total[1] += update_sq
            if p.ndim < 2:
                continue
            values[f"grad_norm/{name}"] = math.sqrt(grad_sq)
            values[f"update_norm/{name}"] = math.sqrt(update_sq)
            if lr:
                values[f"update_rms/{name}"] = math.sqrt(update_sq / p.numel()) / lr
            if over_v:
                values[f"grad_over_v/{name}"] = over_v[0]
        # A backward pass computes the gradients of the last layers first.
        last = next((name for name in reversed(self.names.values()) if not math.isfinite(squares.get(name, 0))), None)
        self.bad_gradient = None if last is None else f"the gradient of {last}"
        whole_sq, update_sq = groups.pop("")
        for group, (group_sq, group_update_sq) in groups.items():
            values[f"grad_norm/{group}"] = math.sqrt(group_sq)
            values[f"update_norm/{group}"] = math.sqrt(group_update_sq)
            values[f"grad_share/{group}"] = group_sq / whole_sq if whole_sq else math.nan
        values |= {"grad_norm": math.sqrt(whole_sq), "update_norm": math.sqrt(update_sq)}
        factor, clipped = numbers
        if self._n_clips:
            values |= {"clip_factor": factor, "clip_share": clipped / self._n_clips}
            self._n_clips, self._clipped = 0, self._clipped.new_zeros(())
        return values


def _innermost(optimizer: Any) -> Optimizer:
    """Return the optimizer inside wrappers such as that of accelerate."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"optimizer is {type(optimizer).__name__}: pass a torch.optim.Optimizer or a list of them")
    return optimizer


def _groups(names: Iterable[str]) -> dict[str, str]:
    """Return the group of each parameter: ``layer03``, or ``decoder.layers.3`` if several lists have layers; the path
    of the module if it is in no layer."""
    layers = {name: layer_of(name) for name in names}
    several = len({layer[0] for layer in layers.values() if layer is not None}) > 1
    groups: dict[str, str] = {}
    for name, layer in layers.items():
        if layer is None:
            groups[name] = name.rpartition(".")[0] or name
        else:
            groups[name] = f"{layer[0]}.{layer[1]}" if several else f"layer{layer[1]:02d}"
    return groups


def _wide(x: Tensor) -> Tensor:
    """Return a tensor without graph in at least fp32."""
    return x.detach() if x.dtype == torch.float64 else x.detach().float()


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


_CLIP = clip_grad._clip_grads_with_norm_  # clip_grad_norm_ calls it, however that is imported
_CLIP_LISTENERS: list[Callable[[list[Tensor], float, Tensor], None]] = []


def _clip_and_tell(
    parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    """Clip gradients by norm, and call each listener: ``f(parameters, max_norm, norm)``."""
    clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    _CLIP(clipped, max_norm, total_norm, foreach)
    for listener in _CLIP_LISTENERS:
        listener(clipped, float(max_norm), total_norm)


@dataclass
class Losses:
    """Losses and log Z by target modality, as sums and counts on the device until `lines` transfers them.

    Args:
        modalities: maps the ids of targets to modalities.
    """

    modalities: Modalities
    _sums_3M: Tensor | None = None  # of this step: count, sum of the losses, sum of log Z
    _has_log_z: bool = False
    _pending: list[tuple[int, Tensor]] = field(default_factory=list)

    @torch.no_grad()
    def add(self, values: Tensor, targets_BT: Tensor) -> None:
        """Add a micro-batch: logits (B, T, V) or losses in nats (B, T), and the target ids (B, T), -100 for none."""
        if self.modalities.ranges is None:
            raise UserError("watch.loss needs the id ranges of the modalities: call attach with modality={...}")
        if values.shape[: targets_BT.ndim] != targets_BT.shape or values.ndim - targets_BT.ndim not in (0, 1):
            raise UserError(
                f"watch.loss got values of shape {tuple(values.shape)} and targets of shape "
                f"{tuple(targets_BT.shape)}: give logits (B, T, V) or losses (B, T), and targets (B, T)"
            )
        is_target = targets_BT != _IGNORED
        values, log_z_BT = _wide(values), None
        if values.ndim > targets_BT.ndim:
            self._has_log_z, log_z_BT = True, log_z(values)
            values = log_z_BT - values.gather(-1, targets_BT.masked_fill(~is_target, 0)[..., None])[..., 0]
        modality_BT = self.modalities.of_ids(targets_BT)
        selected_M = [(modality_BT == m) & is_target for m in range(len(self.modalities.names))]
        # A product with the selection would spread a NaN to other modalities.
        three = (torch.ones_like(values), values, torch.zeros_like(values) if log_z_BT is None else log_z_BT)
        rows = [torch.stack([torch.where(of, x_BT, 0.0).sum() for of in selected_M]).double() for x_BT in three]
        self._sums_3M = torch.stack(rows) if self._sums_3M is None else self._sums_3M + torch.stack(rows)

    @torch.no_grad()
    def end_step(self, step: int, loss: Any, device: torch.device) -> None:
        """Keep the sums of a step, and its loss (a number, a tensor or None)."""
        sums, self._sums_3M = self._sums_3M, None
        if sums is None and loss is None:
            return
        M = len(self.modalities.names)
        sums = torch.zeros(3, M, dtype=torch.float64, device=device) if sums is None else sums.to(device)
        given = [0.0, 0.0] if loss is None else [1.0, loss.detach().double() if isinstance(loss, Tensor) else loss]
        row = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device) for x in given])
        self._pending.append((step, torch.cat([row, sums.flatten()])))

    @property
    def is_full(self) -> bool:
        """Whether `lines` is due."""
        return len(self._pending) >= MOST_PENDING

    def lines(self) -> dict[int, dict[str, float]]:
        """Return and forget the losses by step and tag, merged over ranks. Every rank must call this."""
        if not self._pending:
            return {}
        steps = [step for step, _ in self._pending]
        rows = summed(torch.stack([row for _, row in self._pending])).tolist()  # one transfer
        self._pending = []
        return {step: self._line(row) for step, row in zip(steps, rows, strict=True)}

    def _line(self, row: list[float]) -> dict[str, float]:
        n_given, given, *sums = row
        names, M = self.modalities.names, len(self.modalities.names)
        counts, losses, log_zs = sums[:M], sums[M : 2 * M], sums[2 * M :]
        line = {"loss": given / n_given} if n_given else {"loss": sum(losses) / sum(counts)} if sum(counts) else {}
        for name, n, loss, z in zip(names, counts, losses, log_zs, strict=True):
            if n:
                line[tag("loss", name)] = loss / n
                if self._has_log_z:
                    line[tag("log_z", name)] = z / n
        return line
