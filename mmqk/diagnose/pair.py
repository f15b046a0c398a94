"""Two runs, or two windows of one: where they part, which fields differ, and whose gradients grew."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from mmqk.diagnose.logs import Log
from mmqk.store import UserError, differing_fields, parsed_tag

LIMIT = 6  # spreads
WINDOW = 50  # values of a series before the compared one
FEWEST = 8  # values before the first compared one, if the spread is that of the runs themselves
HOLD = 5  # values in a row beyond the limit
LOSS_NATS = 0.1  # smaller differences of a loss are no parting, nor are factors below
FACTOR = 1.25
NOT_COMPARED = re.compile(r"tokens_per_s|alarm/.*|probe_sequences|captions_cut|attn_layers_\w+|budget_window")
NATS = re.compile(r"(val_)?(loss|log_z|excess)(/.*)?|attn_entropy.*")
# A parameter belongs to the first group whose expression is found in its name.
GROUPS = {
    "head": r"(^|[._])(lm_head|head|output|output_layer|embed_out|unembed\w*)\.(weight|bias)$",
    "embedding": r"embed|(^|\.)w[tp]e\b|patch",
    "norms": r"norm|(^|\.)ln(_|\d|\.)",
    "gates": r"(^|\.)(w_g|attn_gate|g_proj|router|gate)(\.|$)",
    "attention": r"attn|attention|qkv|(^|\.)(w?[qkvo]|[qkvo]_proj|w_[qkvo])(\.|$)",
    "MLP": r"mlp|ffn|feed_forward|expert|moe|(^|\.)(w[123]|fc\d?)(\.|$)",
}


@dataclass(frozen=True)
class Parting:
    """A series of the run that left the spread and stayed beyond it.

    Attributes:
        tag: the series; ``statistic``, ``modality`` (or None) and ``layer`` (or None) are its parts.
        step: the first step beyond the limit.
        run, reference: the value of the run there, and of the reference (the mean of several).
        spread: standard deviation that one value has by chance; in nats for a loss, a log z or an entropy, else of the
            logarithm.
        spreads: the difference in spreads; infinite if one of the values is not finite.
    """

    tag: str
    statistic: str
    modality: str | None
    layer: int | None
    step: int
    run: float
    reference: float
    spread: float
    spreads: float


def part(run: Log, references: Sequence[Log]) -> list[Parting]:
    """Return the series in which a run parts from its reference, or from several seeds of it, the first one first.

    With several references, the spread of a series is the standard deviation of the references about their mean over
    the `WINDOW` values up to the step, or the mean one of its statistic over layers and modalities if that is larger:
    few seeds can agree by chance. With one reference, it is the spread of the difference before the step (1.48 times
    the median distance from its median), so a constant difference is no parting. A parting is at least `LIMIT` spreads
    and `LOSS_NATS` or `FACTOR`, for `HOLD` values in a row (or all that are left, if one is not finite). Series of
    heads are not compared, and only steps that all logs have.

    Raises:
        UserError: the logs have no series with a step in common.
    """
    tables: dict[str, pd.DataFrame] = {}
    for tag in map(str, run.metrics):
        if (
            parsed_tag(tag).head is None
            and not NOT_COMPARED.fullmatch(tag)
            and all(tag in r.metrics for r in references)
        ):
            table = pd.concat([log.metrics[tag] for log in (run, *references)], axis=1, join="inner").dropna()
            tables |= {tag: table} if len(table) else {}
    if not tables:
        raise UserError(f"{run.source} and {references[0].source} have no series with a step in common: check --step")
    variances = {
        tag: _scaled(table, tag).iloc[:, 1:].var(axis=1).rolling(WINDOW, 1).mean() for tag, table in tables.items()
    }
    partings = []
    for tag, table in tables.items():
        own = parsed_tag(tag)
        of_statistic = [v for other, v in variances.items() if parsed_tag(other).statistic == own.statistic]
        pooled = pd.concat(of_statistic, axis=1).mean(axis=1).reindex(variances[tag].index)
        variance = variances[tag].clip(lower=pooled) if len(references) > 1 else None
        if (found := _leaves(table, tag, variance)) is not None:
            at, spread, spreads = found
            values = table.loc[at].to_numpy()
            parts = (own.statistic, own.modality, own.layer, at, float(values[0]), float(values[1:].mean()))
            partings.append(Parting(tag, *parts, spread, spreads))
    return sorted(partings, key=lambda parting: (parting.step, -parting.spreads))


def _scaled(table: pd.DataFrame, tag: str) -> pd.DataFrame:
    """Return the finite rows; logarithms, unless the series is in nats or not positive."""
    finite: pd.DataFrame = table[(table.abs() < np.inf).all(axis=1)]
    return pd.DataFrame(np.log(finite)) if not NATS.fullmatch(tag) and (finite.to_numpy() > 0).all() else finite


def _leaves(table: pd.DataFrame, tag: str, variance: pd.Series | None) -> tuple[int, float, float] | None:
    """Return step, spread and spreads of the first value from which the first column is apart from the others."""
    values, finite = _scaled(table, tag), table.abs() < np.inf
    others = values.iloc[:, 1:]
    difference = values.iloc[:, 0] - others.mean(axis=1)
    if variance is not None:
        spread = (variance * (1 + 1 / others.shape[1])) ** 0.5
    else:
        difference -= difference.expanding(FEWEST).median().shift()
        spread = 1.4826 * difference.abs().expanding(FEWEST).median().shift()
    smallest = LOSS_NATS if NATS.fullmatch(tag) else np.log(FACTOR)
    beyond = (difference.abs() > np.maximum(LIMIT * spread, smallest)) & spread.notna()
    one_sided = (finite.iloc[:, 0] != finite.iloc[:, 1:].all(axis=1))[~finite.all(axis=1)]
    apart = pd.concat([beyond, one_sided]).sort_index()
    # True where this value and the next HOLD - 1 are apart; fewer are enough at an end that is not finite.
    fewest = 1 if one_sided.any() and apart.iloc[-1] else HOLD
    held = apart[::-1].astype(int).rolling(HOLD, fewest).min()[::-1] > 0
    if not held.any():
        return None
    step = int(held.index.to_numpy()[held.to_numpy().argmax()])
    before = spread.loc[:step].dropna()
    width = float(before.iloc[-1]) if len(before) else np.nan
    size = abs(float(difference[step])) if step in difference.index else np.inf
    return step, width, size / width if width else np.inf


@dataclass(frozen=True)
class Apart:
    """A loss that is apart from that of the reference to the end: from ``step`` on, which is ``first`` if that is the
    first common step; ``run`` and ``reference`` are the medians of the last values, in nats."""

    tag: str
    step: int
    first: bool
    run: float
    reference: float


def apart(run: Log, reference: Log) -> list[Apart]:
    """Return the losses that are apart to the end, the first one first; also of runs that differ from the first step.

    A loss is apart where the median of the difference over a twentieth of the common steps (at least `HOLD`) stays
    above `LOSS_NATS` and above `LIMIT` of its standard errors. The noise is that of successive differences, so
    batches of different seeds are allowed; a slow series such as a norm has no such noise and is not compared.
    """
    found = []
    for tag in [tag for tag in map(str, run.metrics) if re.fullmatch(r"loss(/.*)?", tag) and tag in reference.metrics]:
        table = pd.concat([run.metrics[tag], reference.metrics[tag]], axis=1, join="inner").dropna()
        table = table[(table.abs() < np.inf).all(axis=1)]
        width = max(HOLD, len(table) // 20)
        if len(table) < 2 * width:
            continue
        difference = table.iloc[:, 0] - table.iloc[:, 1]
        noise = 1.4826 * difference.diff().abs().median() / 2**0.5
        median = difference.rolling(width).median().dropna()
        beyond = median.abs() > max(LOSS_NATS, LIMIT * 1.25 * noise / width**0.5)  # 1.25: of a median
        if not beyond.iloc[-1]:
            continue
        since = int((~beyond).to_numpy().nonzero()[0].max(initial=-1)) + 1  # the place after the last that is not
        step = int(table.index[since])
        ends = table.iloc[-width:].median()
        found.append(Apart(tag, step, since == 0, float(ends.iloc[0]), float(ends.iloc[1])))
    return sorted(found, key=lambda one: one.step)


def at_the_end(run: Log, reference: Log) -> pd.DataFrame:
    """Return the series at the last step that both logs have, those first whose values differ by the largest factor:
    ``series``, ``run``, ``reference``. Its ``attrs`` have that ``step`` and the number of common ``steps``."""
    common = run.metrics.index.intersection(reference.metrics.index)
    tags = [t for t in run.metrics if t in reference.metrics and not NOT_COMPARED.fullmatch(str(t))]
    ends = [log.metrics.loc[common, tags].ffill().iloc[-1] for log in (run, reference)]
    table = pd.concat(ends, axis=1, keys=["run", "reference"]).dropna().rename_axis("series").reset_index()
    sizes = np.log(table[["run", "reference"]].abs().clip(1e-30).to_numpy())
    table = table.iloc[np.argsort(-np.abs(sizes[:, 0] - sizes[:, 1]), kind="stable")]
    table.attrs |= {"step": int(common[-1]), "steps": len(common)}
    return table


def differing(run: Log, reference: Log) -> pd.DataFrame:
    """Return the fields of the configs that differ, with both values; None if a config does not have the field."""
    fields = differing_fields(run.config, reference.config)
    rows = [(run.config.get(field), reference.config.get(field)) for field in fields]
    return pd.DataFrame(rows, index=pd.Index(fields, name="field"), columns=["run", "reference"])


@dataclass(frozen=True)
class GradientGrowth:
    """Growth of grad_norm² between two windows of a run, by parameter.

    Attributes:
        before, after: the windows, first and last step.
        ratio: mean grad_norm² of the second window over that of the first.
        covered: share of grad_norm² in the second window that the logged parameters sum up to; about 1 if all of them
            are logged.
        parameters: a row per parameter, the largest share first: ``group``, ``before`` and ``after`` (mean squared
            gradient norm), ``growth`` (their difference), ``share`` of the growth of all logged parameters.
        groups: the same, summed by group (`GROUPS`).
    """

    before: tuple[int, int]
    after: tuple[int, int]
    ratio: float
    covered: float
    parameters: pd.DataFrame
    groups: pd.DataFrame


def gradient_growth(
    log: Log, before: tuple[int, int] | None = None, after: tuple[int, int] | None = None
) -> GradientGrowth:
    """Return which parameters the growth of grad_norm² came from.

    Args:
        log: a log with series ``grad_norm/PARAMETER``.
        before, after: windows, first and last step; by default the second and the last tenth of the logged steps.

    Raises:
        UserError: the log has no gradient norms of parameters, or a window has none.
    """
    parameters = [str(tag) for tag in log.metrics if str(tag).startswith("grad_norm/")]
    if not parameters:
        raise UserError(
            f"{log.source} has no gradient norms of parameters: log grad_norm/PARAMETER (monitor.parameters)"
        )
    squares = log.metrics[parameters].replace(np.inf, np.nan).dropna(how="all") ** 2
    steps = squares.index.to_numpy()
    first, last = ((round(k * (len(steps) - 1) / 10), round((k + 1) * (len(steps) - 1) / 10)) for k in (1, 9))
    before = before or (int(steps[first[0]]), int(steps[first[1]]))
    after = after or (int(steps[last[0]]), int(steps[last[1]]))
    table = pd.DataFrame({"before": squares.loc[slice(*before)].mean(), "after": squares.loc[slice(*after)].mean()})
    if table.isna().any(axis=None):
        raise UserError(f"{log.source} has no gradient norms in the steps {before} or {after}: give other windows")
    table.index = pd.Index([tag.partition("/")[2] for tag in parameters], name="parameter")
    table.insert(0, "group", [_group(name) for name in table.index])
    table["growth"] = table["after"] - table["before"]
    table["share"] = table["growth"] / table["growth"].sum()
    total = table[["before", "after"]].sum()
    covered = np.nan
    if "grad_norm" in log.metrics:
        norms = log.metrics["grad_norm"].replace(np.inf, np.nan).reindex(steps) ** 2
        covered = float(total["after"] / norms.loc[slice(*after)].mean())
    groups = table.groupby("group")[["before", "after", "growth", "share"]].sum()
    return GradientGrowth(
        before,
        after,
        float(total["after"] / total["before"]),
        covered,
        table.sort_values("share", ascending=False),
        groups.sort_values("share", ascending=False),
    )


def _group(parameter: str) -> str:
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, parameter.lower())), "other")


def radial_budget(log: Log, window: tuple[int, int] | None = None) -> pd.DataFrame:
    """Return what changed ‖W‖² of W_q and W_k: means over the windows of the radial budget (docs/statistics.md), each
    as a share of ‖W‖².

    ``radial`` is the part of the updates along W by the losses of all modalities, ``decay`` weight decay, ``step`` the
    squared length of the updates, ``other`` updates of earlier gradients and rounding, ``total`` their sum. A row per
    matrix and layer, such as ("q", 0); the table is empty if the log has no budget.
    """
    metrics = log.metrics.loc[slice(*window)] if window else log.metrics
    parts = {"radial": "/[^/]+", "decay": "_decay", "step": "_step", "other": "_(unattributed|rest)", "total": "_total"}
    rows: dict[tuple[str, int], dict[str, float]] = {}
    for tag in metrics:
        if match := re.fullmatch(r"w_([qk])_sq/layer(\d+)", str(tag)):
            own = rows[match[1], int(match[2])] = {}
            for name, pattern in parts.items():
                growth = re.compile(rf"w_{match[1]}_growth{pattern}/layer{match[2]}")
                changed = metrics[[c for c in metrics if growth.fullmatch(str(c))]].sum(axis=1, min_count=1)
                own[name] = float((changed / metrics[tag]).mean())
    return pd.DataFrame(
        list(rows.values()), index=pd.MultiIndex.from_tuples(rows, names=["matrix", "layer"]) if rows else None
    )
