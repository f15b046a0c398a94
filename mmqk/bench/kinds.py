"""Which kind of fault is it? A table of signs, written by hand: the sign that appears first in a run names the kind.

The signs read the log of a run alone. A run without a sign is not accused; where an alarm began all the same, the
answer is "don't know".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from mmqk.bench.rules import SETTLED, columns, noise
from mmqk.bench.traces import HEALTHY, LASTING, NONE, Label, Trace, parts_of
from mmqk.lab.formatting import markdown_table
from mmqk.lab.runs import Run
from mmqk.store.metrics import parse_tag

DONT_KNOW, NO_FAULT = "don't know", "no fault"
# Where a sign can be read. A log "from the start" begins at one of the first steps; one of the "size" of the bench is
# at most twice as long as its runs (600 steps), and its first losses (nats) are near those of the bench (7.7 to 8.4)
# and the zoo (5.2 to 5.5). How far a "loss" falls depends on the vocabulary and the unigram loss, which a log does not
# have: its signs hold for runs like those of the bench alone. All healthy runs of the zoo halve their loss by step 241.
FIRST_STEP = 10
SIZES = {"size": (1200, 4.0, 9.0), "loss": (600, 7.0, 9.0)}  # last step, lowest and highest first loss
RISE_STDS = 3.5  # chosen after logs of healthy fine-tunings were seen
HIGHER = 1.25  # warm restarts return to the highest rate, which the warm-up may have cut short
EASY = "a small vocabulary or easy data give this too"


def level(values: pd.DataFrame) -> pd.DataFrame:
    """The value itself."""
    return values


def cosine(values: pd.DataFrame) -> pd.DataFrame:
    """The largest absolute logit of a layer at the first probe over the product of the largest norms of its queries
    and keys: at most the softmax scale, 1 / sqrt(head_dim)."""
    row = values.iloc[:1]
    layers = {parse_tag(tag).layer for tag in row}
    parts = {
        f"attn_logit_absmax/layer{layer:02d}": [
            row.filter(regex=f"^{name}/.*/layer{layer:02d}$").max(axis=1)
            for name in ("attn_logit_absmax", "q_norm_max", "k_norm_max")
        ]
        for layer in sorted(layer for layer in layers if layer is not None)
    }
    return pd.DataFrame({tag: logit / (query * key) for tag, (logit, query, key) in parts.items()})


def jump(values: pd.DataFrame) -> pd.DataFrame:
    """The value divided by the value before it."""
    before = values.shift(1)
    return (values / before.where(before > 0)).loc[SETTLED:]


def jump_after_warmup(values: pd.DataFrame) -> pd.DataFrame:
    """`jump` to above `HIGHER` times all earlier values, from the first step on at which the value does not rise."""
    rises = values[(values > 0).any(axis=1)].diff().max(axis=1).iloc[1:] > 0
    jumps = jump(values).where(values > HIGHER * values.cummax().shift())
    return jumps.loc[rises.index[~rises].min() :] if not rises.all() else jumps.iloc[:0]


def drop(values: pd.DataFrame) -> pd.DataFrame:
    """The value before it divided by the value."""
    return (values.shift(1) / values).loc[SETTLED:]


def rise(values: pd.DataFrame) -> pd.DataFrame:
    """The median of the last 5 values minus that of the 50 before them."""
    return (values.rolling(5).median() - values.shift(5).rolling(50).median()).loc[SETTLED:]


def rise_above_noise(values: pd.DataFrame) -> pd.DataFrame:
    """`rise`, where it is more than `RISE_STDS` standard deviations (`noise`) of the values before."""
    return rise(values).where(lambda rises: rises > RISE_STDS * noise(values).shift(5).loc[SETTLED:])


def of_largest(values: pd.DataFrame) -> pd.DataFrame:
    """The first value divided by the largest of the first 100."""
    return values.iloc[:1] / values.iloc[:100].max()


def of_first(values: pd.DataFrame) -> pd.DataFrame:
    """How far the median of 20 values is below the first value, as a share of it."""
    return 1 - values.rolling(20).median() / values.bfill().iloc[0]


@dataclass(frozen=True)
class Sign:
    """A kind of fault, and a reading of a statistic that is above a limit where it has begun; ``scope``: what the log
    must be for that ("start", "size" or "loss"), empty for any log."""

    kind: str
    statistic: str
    reading: Callable[[pd.DataFrame], pd.DataFrame]
    above: float
    meaning: str
    scope: str = ""

    @property
    def name(self) -> str:
        """The kind and the statistics, which together are different for each sign."""
        return f"{self.kind} {self.statistic}"


# Of signs at the same step, the one that stands first here is used.
SIGNS = (
    Sign("rate", "lr", jump_after_warmup, 2.0, "the learning rate rose at once"),
    Sign("warm-up", "lr", of_largest, 0.5, "the learning rate began at its highest", "start"),
    Sign("optimizer", "adam_below_eps", level, 0.95, "Adam's eps is above nearly every second moment"),
    Sign("moments", "adam_below_eps", lambda values: values.diff().loc[SETTLED:], 0.1, "second moments vanished"),
    Sign("logits", "attn_logit_absmax q_norm_max k_norm_max", cosine, 0.4,
         "the softmax scale is above that of heads with 8 channels"),
    Sign("dead", "attn_rank", drop, 4.0, "the rank of a layer's attention collapsed at once"),
    Sign("decay", "w_q_norm w_k_norm w_v_norm w_o_norm w_gate_norm w_up_norm w_down_norm", drop, 1.25,
         "a matrix shrank at once"),
    Sign("logits", "attn_logit_absmax", jump, 4.0, "the attention logits of a layer rose at once"),
    Sign("embedding", "embed_row_norm", jump, 2.0, "the embedding rows of a modality rose at once"),
    Sign("precision", "update_rms", lambda values: (values == 0).astype(float), 0.5, "an update changed nothing"),
    Sign("targets", "loss", lambda values: of_first(values).loc[:SETTLED], 0.35,
         f"a loss is far below its first value within {SETTLED} steps; {EASY}", "loss"),
    Sign("repeats", "loss", lambda values: -rise(values), 2.0, "a loss fell at once", "size"),
    Sign("leak", "loss", of_first, 0.5, f"a loss is below half of its first value; {EASY}", "loss"),
    Sign("data", "loss", rise_above_noise, 0.5, "a loss rose at once, and no statistic of the model before it"),
    Sign("rate", "attn_logit_absmax", level, 500.0, "attention logits grew beyond 500", "size"),
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """The first sign of a run: its step, and the series (statistic, modality, layer) that shows it."""

    sign: Sign
    step: int
    series: str
    value: float


def out_of_scope(sign: Sign, metrics: pd.DataFrame) -> str:
    """Return why a sign does not hold for a log; an empty string if it does, or if the log lacks its statistic."""
    values = columns(metrics, *sign.statistic.split())
    if values.empty or not sign.scope:
        return ""
    if (counts := metrics.attrs.get("counts", "steps")) != "steps":
        return f"it reads the first steps, and this log counts {counts}"
    if values.index[0] > FIRST_STEP:
        return f"it compares with the first value, and this log begins at step {values.index[0]:,}"
    first = metrics.filter(regex="^loss(/|$)").bfill().iloc[0]
    last, low, high = SIZES.get(sign.scope, (np.inf, -np.inf, np.inf))
    if sign.scope in SIZES and not (metrics.index[-1] <= last and first.between(low, high).all()):
        return (
            f"its limit is for runs of at most {last:,} steps whose loss begins at {low:g} to {high:g} nats; a log has"
            " neither the vocabulary nor the unigram loss"
        )
    return ""


def findings(metrics: pd.DataFrame) -> list[Finding]:
    """Return the signs of a run that hold for its log (`out_of_scope`) in the order in which they appear; each at its
    first step."""
    found = []
    for sign in SIGNS:
        values = columns(metrics, *sign.statistic.split())
        if values.empty or out_of_scope(sign, metrics):
            continue
        read = sign.reading(values)
        above = read.index[(read > sign.above).any(axis=1)]
        if len(above):
            row = read.loc[above[0]]
            found.append(Finding(sign, int(above[0]), str(row.idxmax()), float(row.max())))
    return sorted(found, key=lambda finding: finding.step)


def show_failure(kinds: Iterable[str], others: bool) -> bool:
    """Return whether signs of these kinds show a failure. A missing warm-up is a setting: its sign counts only beside
    another sign, or if ``others`` fired (facts, lasting alarms). All healthy runs of the bench have a warm-up, so
    how often the sign alone accuses a healthy run without one was not measured."""
    return others or any(kind != "warm-up" for kind in kinds)


def kind_of(metrics: pd.DataFrame, alarmed: bool = False) -> str:
    """Return the kind of the first sign; without one, "don't know" if a rule raised an alarm, else "no fault"."""
    found = findings(metrics)
    return found[0].sign.kind if found else DONT_KNOW if alarmed else NO_FAULT


def confusion(traces: Sequence[Trace], alarmed: Sequence[bool]) -> str:
    """Return a table in Markdown: for each true kind, how often each kind was named.

    Args:
        traces: the runs.
        alarmed: whether a rule raised an alarm in each run.
    """
    said = [kind_of(trace.metrics, alarm) for trace, alarm in zip(traces, alarmed, strict=True)]
    table = pd.crosstab(np.array([trace.label.kind or NO_FAULT for trace in traces]), np.array(said))
    names = [*sorted(set(said) - {DONT_KNOW, NO_FAULT}), DONT_KNOW, NO_FAULT]
    table = table.reindex(columns=names, fill_value=0)
    rows = [
        [str(kind), *(f"**{n}**" if kind == name and n else str(n or "") for name, n in row.items())]
        for kind, row in table.iterrows()
    ]
    return markdown_table(["true kind", *names], rows)


def places(traces: Sequence[Trace]) -> str:
    """Return how often the first sign stands in the layer or the modality of the label: of the runs
    whose label has one and whose kind is right."""
    right = []
    for label, found in [(trace.label, findings(trace.metrics)[:1]) for trace in traces]:
        if found and found[0].sign.kind == label.kind and (label.layer, label.modality) != (None, None):
            tag = parse_tag(found[0].series)
            right.append(tag.layer == label.layer if label.modality is None else tag.modality == label.modality)
    return f"layer or modality of the first sign: right in {sum(right)} of {len(right)} runs"


def what_fails_first(runs: Iterable[Run]) -> str:
    """Return a row for each failing run without a change: the first sign, the first lasting
    alarm, and the step from which the run is worse than the healthy run of its seed, as a table in Markdown."""
    finished = [run for run in runs if run.status.finished]
    twins = {run.seed: Trace(run, Label(), "judge") for run in finished if run.arm == HEALTHY}
    lines = []
    for run in (run for run in finished if parts_of(run)[0] == NONE):
        trace = Trace(run, Label(parts_of(run)[1]), "judge", twins.get(run.seed))
        sign = next(([f"{one.sign.kind} @{one.step}", one.series] for one in findings(trace.metrics)), ["none", ""])
        alarms = [(at.index[at > 0][0], name) for name, at in trace.alarms.items() if name in LASTING and at.any()]
        alarm = next((f"{name} @{step}" for step, name in sorted(alarms)), "none")
        lines.append([trace.label.kind, str(run.seed), *sign, alarm, str(trace.failed_at or "")])
    heads = ["failure", "seed", "first sign", "its series", "first alarm", "fails from"]
    return markdown_table(heads, lines, "---")
