"""The losses of a training loop by target modality, and the alarms that `attach` raises while a model trains.

Shapes: B batch, T tokens, V vocabulary, M modalities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmqk.distributed import rank, summed, world_size
from mmqk.monitors.foreign.sides import Modalities
from mmqk.store import Alarm, AlarmRules, UserError, append_alarms, parsed_tag, tag

MOST_PENDING = 100  # steps whose losses stay on the device at most
_IGNORED = -100  # a target that torch's cross_entropy leaves out


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
        values = values.detach() if values.dtype == torch.float64 else values.detach().float()
        log_z_BT = None
        if values.ndim > targets_BT.ndim:
            self._has_log_z, log_z_BT = True, values.logsumexp(-1)
            values = log_z_BT - values.gather(-1, targets_BT.masked_fill(~is_target, 0)[..., None])[..., 0]
        modality_BT, M = self.modalities.of_ids(targets_BT), len(self.modalities.names)
        selected_M = [(modality_BT == m) & is_target for m in range(M)]
        counts_M = torch.stack([of.sum() for of in selected_M]).double()
        losses_M = _sums(values, selected_M)
        log_zs_M = torch.zeros_like(losses_M) if log_z_BT is None else _sums(log_z_BT, selected_M)
        sums_3M = torch.stack([counts_M, losses_M, log_zs_M])
        self._sums_3M = sums_3M if self._sums_3M is None else self._sums_3M + sums_3M

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
        for name, n, loss, log_z in zip(names, counts, losses, log_zs, strict=True):
            if n:
                line[tag("loss", name)] = loss / n
                if self._has_log_z:
                    line[tag("log_z", name)] = log_z / n
        return line


def _sums(x_BT: Tensor, selected_M: list[Tensor]) -> Tensor:
    """Return the sum over each selection. A product with the selection would spread a NaN to other modalities."""
    return torch.stack([torch.where(of, x_BT, 0.0).sum() for of in selected_M]).double()


@dataclass
class LiveAlarms:
    """Applies the rules of docs/alarms.md to the numbers of a watch; prints each kind of alarm once.

    Args:
        rules: the rules, with the length of the run and of its warm-up.
        on_alarm: called with each alarm; or None.
        folder: the run folder, which gets ``alarms.jsonl``; or None.
    """

    rules: AlarmRules
    on_alarm: Callable[[Alarm], Any] | None = None
    folder: Path | None = None
    _printed: set[tuple[str, str, str | None]] = field(default_factory=set)

    def update(self, step: int, values: Mapping[str, float], bad_site: Callable[[], str | None]) -> None:
        """Add the numbers of a step, on the first rank.

        Args:
            step: optimizer step.
            values: all numbers of the step, by tag.
            bad_site: returns the first place with a value that is not finite.
        """
        if rank() > 0:
            return
        for alarm in self.rules.update(step, values):
            if alarm.name == "non_finite" and world_size() == 1 and (site := bad_site()):
                alarm = replace(alarm, sentence=f"{alarm.sentence}; the first is {site}")
            if self.folder is not None:
                append_alarms(self.folder, [alarm])
            parsed = parsed_tag(alarm.tag)
            kind = (alarm.name, parsed.statistic, parsed.modality)
            if kind not in self._printed:
                self._printed.add(kind)
                print(f"mmqk: alarm at {alarm.line()}", flush=True)
            if self.on_alarm is not None:
                self.on_alarm(alarm)


def kind_of(x: Tensor) -> str | None:
    """Return "NaN" or "infinite"; None if all values are finite."""
    if not x.is_floating_point() or torch.isfinite(x).all():
        return None
    return "NaN" if torch.isnan(x).any() else "infinite"
