"""Stores the statistics of a probe as tensors that merge exactly over ranks, and computes the numbers by tag.

A failure on one rank ends a probe on every rank. Every collective operation of a probe of `attach` follows a call of
`agreed`. A rank whose probe fails calls `failed_here` once, in place of its next `agreed`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from mmqk.distributed import summed, world_size
from mmqk.monitors.formulas.reduce import Sums
from mmqk.store.tags import parsed_tag

# Computes the value of each tag, and the number of values in its mean, from the merged tensors of a part.
Finish = Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]]


@dataclass
class StatisticPart:
    """Statistics that are computed together.

    Attributes:
        tags: tags of these statistics.
        raw: tensors to merge over ranks, by name. Tensors whose names start with ``max`` are merged by maximum, with
            ``tail`` by concatenation, and all others by sum.
        finish: computes the value and the count of each tag; tags with count 0 are left out.
    """

    tags: list[str]
    raw: dict[str, Tensor]
    finish: Finish


@dataclass
class Probe:
    """Statistics of one batch, still on the device.

    Attributes:
        sequences: number of probed sequences, over all ranks; maxima are exact over these sequences.
        parts: the statistics, in the order in which the forward pass computes them.
    """

    sequences: int
    parts: list[StatisticPart] = field(default_factory=list)

    def add(self, tags: list[str], raw: dict[str, Tensor], finish: Finish) -> None:
        self.parts.append(StatisticPart(tags, raw, finish))

    def add_values(self, tags: list[str], values: Tensor) -> None:
        """Add numbers that are the same on every rank, such as those of weights."""
        self.add(tags, {"max": values.float()}, lambda raw: (raw["max"], torch.ones_like(raw["max"])))

    def add_means(self, tags: list[str], sums: Sums) -> None:
        """Add one mean for each tag, from its count and sum."""
        raw = {"sum": sums.sum, "count": sums.count}
        self.add(tags, raw, lambda raw: (raw["sum"] / raw["count"], raw["count"]))

    def merged(self) -> Probe:
        """Merge the probe over all ranks and return it. This is a collective call; every rank must have probed the
        same tags."""
        if (world := world_size()) == 1:
            return self
        for part in self.parts:
            for name, tensor in part.raw.items():
                if name.startswith("tail"):
                    gathered = [torch.empty_like(tensor) for _ in range(world)]
                    dist.all_gather(gathered, tensor.contiguous())
                    part.raw[name] = torch.cat(gathered)
                else:
                    op = dist.ReduceOp.MAX if name.startswith("max") else dist.ReduceOp.SUM
                    dist.all_reduce(tensor, op)
        self.sequences *= world
        return self

    def flat(self) -> dict[str, float]:
        """Return ``{tag: number}``, with one transfer to the host."""
        if not self.parts:
            return {}
        finished = [part.finish(part.raw) for part in self.parts]
        both = torch.stack([torch.cat([f[i].float().flatten() for f in finished]) for i in (0, 1)])
        values, counts = both.tolist()
        tags = [t for part in self.parts for t in part.tags]
        return {t: v for t, v, n in zip(tags, values, counts, strict=True) if n}


def _all(reducer: Callable[[Sequence[float]], float]) -> Callable[[Sequence[float]], float]:
    """Return a reducer that gives NaN if any value is NaN; Python's max would depend on the order of values."""
    return lambda values: math.nan if any(map(math.isnan, values)) else reducer(values)


REDUCERS = {"max": _all(max), "min": _all(min), "median": _all(statistics.median)}
# The reducers of each statistic by layer.
BY_LAYER = {
    "attn_logit_absmax": ("max",),
    "attn_entropy": ("median", "min"),
    "q_norm": ("max", "median"),
    "k_norm": ("max", "median"),
    "v_norm": ("max",),
    "attn_logit_mean": ("median",),
    "attn_logit_offset_var": ("max",),
    "attn_logit_spread_var": ("max",),
    "logit_alignment": ("max",),
    "resid_norm": ("max",),
    "attn_out_norm": ("max",),
    "mlp_out_norm": ("max",),
    "attn_rank": ("min",),
    "qk_clip_logit": ("max",),
    "qk_clip_gamma": ("min",),
}


def over_layers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the reductions over layers of the statistics in `BY_LAYER`; values by head are ignored."""
    layers: dict[str, list[float]] = {}
    for name, value in metrics.items():
        parsed = parsed_tag(name)
        if parsed.head is None and parsed.layer is not None and parsed.statistic in BY_LAYER:
            layers.setdefault(name.rpartition("/")[0], []).append(value)
    return {
        f"{series}/{reducer}": float(REDUCERS[reducer](values))
        for series, values in layers.items()
        for reducer in BY_LAYER[series.split("/")[0]]
    }


_FLAGS = 4
_FINAL = 1000  # more than the number of ranks


class ProbeError(RuntimeError):
    """Raised if a probe failed.

    Attributes:
        is_final: whether a probe of the whole batch would fail too.
        is_fatal: whether the other ranks cannot go on, so that the run ends.
    """

    def __init__(self, message: str, is_final: bool, is_fatal: bool = False):
        super().__init__(message)
        self.is_final, self.is_fatal = is_final, is_fatal


class FailedElsewhereError(RuntimeError):
    """Raised on the other ranks if a probe failed on one rank.

    Attributes:
        is_final: whether a probe of the whole batch would fail too.
    """

    def __init__(self, is_final: bool):
        super().__init__("the probe failed on another rank")
        self.is_final = is_final


def agreed(device: torch.device, *flags: bool) -> list[bool]:
    """Return for each of at most four flags whether it is true on any rank.

    Raises:
        FailedElsewhereError: the probe failed on another rank.
    """
    if world_size() == 1:
        return list(flags)
    values = [0.0, *map(float, flags), *[0.0] * (_FLAGS - len(flags))]
    failed, *sums = summed(torch.tensor(values, device=device)).tolist()
    if failed:
        raise FailedElsewhereError(failed >= _FINAL)
    return [bool(x) for x in sums[: len(flags)]]


def failed_here(device: torch.device, is_final: bool) -> bool:
    """Make `agreed` raise on every other rank, and return whether any rank's failure is final."""
    if world_size() == 1:
        return is_final
    failed = float(_FINAL if is_final else 1)
    return bool(summed(torch.tensor([failed, *[0.0] * _FLAGS], device=device))[0] >= _FINAL)
