"""The table of a preflight, and the context that its checks share: one batch, and passes with everything restored.

Shapes: B batch, T tokens, V vocabulary, M modalities.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from mmqk.monitors.adapters import device_of, unwrapped
from mmqk.monitors.foreign.calls import documents_of_positions
from mmqk.monitors.foreign.inputs import Inputs, named_tensors, valid_tokens
from mmqk.monitors.foreign.isolate import copied, isolated
from mmqk.monitors.foreign.probe import find_logits
from mmqk.monitors.foreign.steps import Optimizers
from mmqk.monitors.modalities import Modality, modalities_of
from mmqk.monitors.preflight.reading import SeenCall, read_calls
from mmqk.store.files import as_json

Loss = Callable[[nn.Module, Any], Tensor]  # from a model and a batch, to a scalar
IGNORED = -100  # the label that a loss leaves out
# A change is a leak from this multiple of the rounding noise.
NOISE_FACTOR = 10
_LIKE_ENTROPY = 0.2  # largest relative error of a derivative that counts as one of a cross-entropy


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
        result: "ok", "FAILED" or "not checked".
        number: the number that decides; None if there is none.
        text: what was measured, or why it was not checked.
        advice: what to do; empty unless the check failed.
        check: what was checked, such as "leaks: causality".
    """

    result: str
    number: float | None
    text: str
    advice: str = ""
    check: str = ""


class NotChecked(Exception):
    """Raised by a check that cannot be done; the message gives the reason."""


@dataclass(frozen=True)
class Table:
    """The findings of a preflight. It prints as text."""

    findings: tuple[Finding, ...]

    @property
    def failed(self) -> list[Finding]:
        """The findings of the checks that failed."""
        return [finding for finding in self.findings if finding.result == "FAILED"]

    def records(self) -> list[dict[str, Any]]:
        """Return the lines as dictionaries."""
        return [asdict(finding) for finding in self.findings]

    def to_json(self) -> str:
        """Return the lines as JSON; a number that is not finite is a string."""
        return json.dumps(as_json(self.records()), indent=2)

    def __str__(self) -> str:
        width = max(len(finding.check) for finding in self.findings)
        lines = []
        for finding in _merged(self.findings):
            number = "" if finding.number is None else f"{finding.number:.3g}"
            lines.append(f"{finding.check:{width}}  {finding.result:11}  {number:>9}  {finding.text}")
            if finding.advice:
                lines.append(f"{'':{width}}  {'':11}  {'':>9}  -> {finding.advice}")
        count = Counter(finding.result for finding in self.findings)
        lines.append(f"{count['ok']} ok, {count['FAILED']} failed, {count['not checked']} not checked")
        return "\n".join(lines)


def _merged(findings: tuple[Finding, ...]) -> list[Finding]:
    """Return the findings with those of a part that are not checked for the same reason as one."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        part = finding.check.partition(": ")[0]
        key = (part, finding.text) if finding.result == "not checked" else (finding.check, "")
        groups.setdefault(key, []).append(finding)
    merged = []
    for (part, _), group in groups.items():
        names = ", ".join(finding.check.partition(": ")[2] for finding in group)
        several = replace(group[0], check=f"{part}: {len(group)} checks", text=f"{group[0].text} ({names})")
        merged.append(several if len(group) > 1 else group[0])
    return merged


class Pass:
    """One call of the loss with the gradients that it gives.

    Attributes:
        inputs: the arguments of the model's call.
        logits_BTV: the logits, or None if the output has none.
        loss: the loss.
        by_logits_BTV: derivative of the loss by the logits; None if there are none or the loss does not use them.
        gradients: gradient of each parameter by name; None if the loss does not depend on it.
    """

    def __init__(self, inputs: Inputs, output: Any, loss: Tensor | None) -> None:
        logits = None if inputs.ids is None else find_logits(output, inputs.ids[1].shape, 0, inputs.root)
        self.inputs, self.loss = inputs, float("nan") if loss is None else float(loss.detach())
        self.logits_BTV = None if logits is None else logits.detach()
        self.by_logits_BTV: Tensor | None = None
        self.gradients: dict[str, Tensor | None] = {}
        if loss is not None and loss.requires_grad:
            if logits is not None and logits.requires_grad:
                self.by_logits_BTV = torch.autograd.grad(loss, logits, retain_graph=True, allow_unused=True)[0]
            parameters = {name: p for name, p in inputs.root.named_parameters() if p.requires_grad}
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            self.gradients = dict(zip(parameters, gradients, strict=True))

    @cached_property
    def targets(self) -> Targets:
        return Targets(self)


class Targets:
    """The targets of a pass of the loss: (B, T) each.

    Raises:
        NotChecked: the loss is no cross-entropy of the logits that the model returns.

    Attributes:
        has: whether a position has a target.
        id: the target.
        weight: derivative of the loss by the target's cross-entropy.
        z: sum of the derivative over the vocabulary, which is not 0 with a z-loss.
        nll: cross-entropy in nats.
    """

    def __init__(self, of: Pass) -> None:
        if of.logits_BTV is None:
            raise NotChecked("cannot be done because no logits of the ids' shape are returned, as with a fused loss")
        if of.by_logits_BTV is None:
            raise NotChecked("cannot be done because the loss does not use the logits that the model returns")
        g, log_p = of.by_logits_BTV.float(), of.logits_BTV.float().log_softmax(-1)
        p, id_BT1 = log_p.exp(), g.argmin(-1, keepdim=True)
        g_y, p_y = g.gather(-1, id_BT1), p.gather(-1, id_BT1)
        size = (g.sum(-1, keepdim=True) - g_y) / (1 - p_y).clamp_min(1e-6)
        self.weight = (size * p_y - g_y).squeeze(-1)
        self.has = self.weight > 1e-3 * self.weight.max()
        fit = (size * p).scatter_add(-1, id_BT1, -torch.where(self.has, self.weight, 0)[..., None])
        if not (fit - g).norm() < _LIKE_ENTROPY * g.norm():
            raise NotChecked("the loss is no cross-entropy of the logits that the model returns")
        self.id, self.z = id_BT1.squeeze(-1), g.sum(-1)
        self.nll = -log_p.gather(-1, id_BT1).squeeze(-1)


def mapped(value: Any, change: Callable[[str, Tensor], Any], name: str = "") -> Any:
    """Return nested mappings, tuples and lists with each tensor replaced by ``change(name, tensor)``; an entry whose
    tensor becomes None is left out of a mapping."""
    if isinstance(value, Tensor):
        return change(name, value)
    if isinstance(value, Mapping):
        parts = {key: mapped(part, change, str(key)) for key, part in value.items()}
        return {key: part for key, part in parts.items() if part is not None or value[key] is None}
    if isinstance(value, tuple | list):
        return type(value)(mapped(part, change, name) for part in value)
    return value


class Context:
    """A model, a batch and what the checks need of them; everything is computed once, on first use.

    Args:
        model: the object that the training loop calls.
        batch: a mapping (``model(**batch)``), a tuple (``model(*batch)``) or a tensor (``model(batch)``).
        loss: a function (model, batch) -> scalar; by default the attribute ``loss`` of the model's output.
        optimizers: the optimizer or a list of them, or None.
        modality: as for `attach`.
    """

    def __init__(
        self, model: nn.Module, batch: Any, loss: Loss | None, optimizers: Optimizers | None, modality: Modality | None
    ):
        self.model, self.root, self.batch = model, unwrapped(model), batch
        given: Any = optimizers or ()
        self.optimizers: list[Any] = [given] if hasattr(given, "param_groups") else list(given)
        self.loss = loss or self._own_loss
        self.modalities = modalities_of(model, modality)
        self.autocast = False  # whether the loss calls a model with half-precision weights under autocast

    # Calls of the model

    def _own_loss(self, model: nn.Module, batch: Any) -> Tensor | None:
        if isinstance(batch, Mapping):
            output = model(**batch)
        else:
            output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        # Some models return the loss alone, or a tuple of logits and loss.
        parts = [loss, *(output if isinstance(output, tuple) else (output,))]
        return next((x for x in parts if isinstance(x, Tensor) and x.numel() == 1), None)

    def training_pass(self, batch: Any) -> Pass:
        """Return a pass of the loss over a batch, in evaluation mode, with its gradients; nothing else changes."""
        calls: list[tuple[Any, ...]] = []  # module, args, kwargs, output, autocast
        (batch,), _ = copied((batch,), {}, self.root)
        caught = self.root.register_forward_hook(
            lambda *call: calls.append((*call, torch.is_autocast_enabled(device_of(self.root).type))), with_kwargs=True
        )
        with caught, isolated(self.root), torch.enable_grad():
            loss = self.loss(self.model, batch)
            if loss is not None and not (isinstance(loss, Tensor) and loss.numel() == 1):
                shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
                raise TypeError(f"loss(model, batch) returned a {type(loss).__name__}{shape}")
            if not calls:
                raise NotChecked("loss(model, batch) does not call the model")
            _, args, kwargs, output, self.autocast = calls[-1]
            return Pass(Inputs(self.model, args, kwargs), output, loss)

    @cached_property
    def first(self) -> Pass:
        """The pass over the batch as it is."""
        return self.training_pass(self.batch)

    @property
    def gradients(self) -> dict[str, Tensor | None]:
        """The gradient of each parameter that requires one.

        Raises:
            NotChecked: there is no loss.
        """
        if not self.first.gradients:
            raise NotChecked("the model's output has no loss: pass labels in the batch, or loss=f(model, batch)")
        return self.first.gradients

    def output(self, inputs: Inputs) -> Tensor:
        """Return the logits, or another output (B, T, D), of a pass without gradients."""
        inputs = inputs.copied()
        shape = self.ids_of(inputs).shape
        with isolated(self.root, autocast=self.autocast):
            output = self.root(*inputs.args, **inputs.kwargs)
        logits = find_logits(output, shape, 0, self.root)
        for x in [logits] if logits is not None else [x for _, x in named_tensors(output)]:
            if x.ndim == 3 and x.shape[:2] == shape and x.is_floating_point():
                return x
        raise NotChecked("cannot be done because the model's output has no tensor with a row for each token")

    # The batch

    @property
    def inputs(self) -> Inputs:
        """The arguments of the model's call."""
        return self.first.inputs

    @cached_property
    def attention_calls(self) -> list[SeenCall]:
        """The attention calls of the batch."""
        return read_calls(self.inputs, self.modalities, autocast=self.autocast)

    @staticmethod
    def ids_of(inputs: Inputs) -> Tensor:
        """Return the token ids, (B, T)."""
        if inputs.ids is None:
            raise NotChecked("the model's inputs have no token ids")
        return inputs.ids[1]

    @cached_property
    def ids_BT(self) -> Tensor:
        """The token ids of the model's call."""
        return self.ids_of(self.inputs)

    @cached_property
    def modality_BT(self) -> Tensor:
        """The modality of each token."""
        return self.modalities.of(self.inputs).to(self.ids_BT.device)

    @cached_property
    def valid_BT(self) -> Tensor:
        """False at padding."""
        return valid_tokens(self.inputs.padding(None), self.ids_BT)

    @cached_property
    def document_BT(self) -> Tensor | None:
        """The document of each token, from document ids or from positions that restart, in the model's inputs or in
        the batch; None if the batch is not packed."""
        for name, x in (*named_tensors(self.inputs.named), *named_tensors(self.batch)):
            words = set(name.lower().removesuffix("s").split("_"))
            if name == "position_ids" and x.shape[-1] == self.ids_BT.shape[1]:
                positions = x[0] if x.ndim == 3 else x
                x = documents_of_positions(positions.expand(self.ids_BT.shape), self.valid_BT)
            elif not words & {"document", "doc", "segment", "sequence", "seq"}:
                continue
            if x.shape == self.ids_BT.shape and bool(((x != x[:, :1]) & self.valid_BT).any()):
                return x
        return None

    @cached_property
    def special_ids(self) -> set[int]:
        """Ids with a meaning of their own, which no check replaces: those that the model's config names."""
        config, found = getattr(self.root, "config", None), set[int]()
        for part in (config, *vars(config).values()) if config else ():
            for name, x in getattr(part, "__dict__", {}).items():
                if name.endswith(("_token_id", "_token_index")):
                    found.update(int(i) for i in (x if isinstance(x, list) else [x]) if i is not None)
        return found

    @cached_property
    def other_ids_BT(self) -> Tensor:
        """Another id of the same modality for each token; the same id where none is known."""
        other = self.ids_BT.clone()
        for m in range(len(self.modalities.names)):
            pool = self.pool(m)
            where = (self.modality_BT == m) & torch.isin(self.ids_BT, pool)
            place = torch.searchsorted(pool, self.ids_BT[where])
            other[where] = pool[(place + len(pool) // 2) % max(len(pool), 1)] if len(pool) else other[where]
        return other

    def pool(self, m: int) -> Tensor:
        """Return the ids of one modality in the batch, sorted, without special ids and padding."""
        ids = self.ids_BT[(self.modality_BT == m) & self.valid_BT].unique()
        return ids[~torch.isin(ids, ids.new_tensor(sorted(self.special_ids)))]

    def changed(self, change: Callable[[str, Tensor], Any], **more: Any) -> Inputs:
        """Return the arguments of the call with each tensor changed (`mapped`), and more arguments."""
        args, kwargs = mapped((self.inputs.args, {**self.inputs.kwargs, **more}), change)
        return Inputs(self.model, args, kwargs)

    def with_ids(self, ids_BT: Tensor) -> Inputs:
        """Return the arguments of the call with other ids."""
        return self.changed(lambda name, x: ids_BT if x is self.ids_BT else x)

    # Passes that are compared

    @cached_property
    def base_BTV(self) -> Tensor:
        """The output of the batch as it is."""
        return self.output(self.inputs)

    @cached_property
    def noise(self) -> float:
        """Rounding noise of the output: the largest change if every module's output is multiplied by 1 ± epsilon.

        Random rounding errors show how far a pass can be off (Monte Carlo arithmetic; Parker, 1997). An equal pass
        would only show whether the kernels are deterministic.
        """
        epsilon = torch.finfo(self.base_BTV.dtype).eps

        def jitter(module: nn.Module, args: Any, output: Any) -> Any:
            if not isinstance(output, Tensor) or not output.is_floating_point():
                return None
            return output * (1 + epsilon * (torch.randint_like(output, 2) * 2 - 1))

        with ExitStack() as hooks:
            for module in self.root.modules():
                if not list(module.children()):
                    hooks.enter_context(module.register_forward_hook(jitter))
            change = self.largest(self.output(self.inputs) - self.base_BTV)
        size = float(self.base_BTV[self.base_BTV > torch.finfo(self.base_BTV.dtype).min].abs().max())
        return NOISE_FACTOR * max(change, epsilon * size)

    @staticmethod
    def largest(change: Tensor) -> float:
        """Return the largest absolute value; infinity if one is not a number."""
        if not change.numel():
            return 0.0
        return float(torch.nan_to_num(change.float(), nan=torch.inf).abs().max())

    def change(self, changed_BT: Tensor, watched_BT: Tensor) -> float:
        """Return the largest change of the output at some tokens if other tokens are replaced."""
        ids_BT = torch.where(changed_BT, self.other_ids_BT, self.ids_BT)
        if torch.equal(ids_BT, self.ids_BT) or not watched_BT.any():
            raise NotChecked("the batch has no tokens that can be replaced by others of their modality")
        return self.largest((self.output(self.with_ids(ids_BT)) - self.base_BTV)[watched_BT])


def judged(is_failed: bool, number: float | None, text: str, advice: str) -> Finding:
    """Return a finding, with the advice only if it failed."""
    return Finding("FAILED" if is_failed else "ok", number, text, advice if is_failed else "")
