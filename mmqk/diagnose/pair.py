"""Two runs: where they part, and whose gradients grew."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd

from mmqk.diagnose.logs import Log
from mmqk.diagnose.names import TABLE
from mmqk.store import UserError, parse_tag

LIMIT = 6  # spreads
FEWEST = 8  # values before the first compared one
HOLD = 5  # values in a row beyond the limit
LOSS_NATS = 0.1  # smaller differences of a loss are no parting, nor are factors below
FACTOR = 1.25
NOT_COMPARED = re.compile(r"tokens_per_s|alarm/.*|probe_sequences|captions_cut|attn_layers_\w+|budget_window")
GROUPS = TABLE["groups"]
NATS = re.compile(r"(val_)?(loss|log_z|excess)(/.*)?|attn_entropy.*")


def _both(run: Log, reference: Log) -> dict[str, pd.DataFrame]:
    """Return the values of two logs at the steps that both have, for each series to compare."""
    tables: dict[str, pd.DataFrame] = {}
    for tag in [tag for tag in map(str, run.metrics) if tag in reference.metrics and not NOT_COMPARED.fullmatch(tag)]:
        table = pd.concat([run.metrics[tag], reference.metrics[tag]], axis=1, join="inner").dropna()
        tables |= {tag: table} if len(table) else {}
    return tables


def part(run: Log, reference: Log) -> list[dict[str, Any]]:
    """Return the series in which a run leaves the spread around its reference and stays beyond it, the first one first.

    A row has ``tag``; the first ``step`` beyond the limit, and there the values ``run`` and ``reference``; ``spread``,
    the standard deviation that one value has by chance, in nats for a loss, a log z or an entropy, else of the
    logarithm; and ``spreads``, the difference in spreads, infinite if one of the values is not finite.

    The spread of a series is that of the difference before the step (1.48 times the median distance from its median),
    so a constant difference is no parting. A parting is at least `LIMIT` spreads and `LOSS_NATS` or `FACTOR`, for
    `HOLD` values in a row (or all that are left, if one is not finite). Series of heads are not compared.

    Raises:
        UserError: the logs have no series with a step in common.
    """
    tables = {tag: table for tag, table in _both(run, reference).items() if parse_tag(tag).head is None}
    if not tables:
        raise UserError(f"{run.source} and {reference.source} have no series with a step in common: check --step")
    partings = [parting for tag, table in tables.items() if (parting := _parting(tag, table)) is not None]
    return sorted(partings, key=lambda parting: (parting["step"], -parting["spreads"]))


def _parting(tag: str, table: pd.DataFrame) -> dict[str, Any] | None:
    """Return the first value from which the first column is apart from the second; None if it is not."""
    finite = table.abs() < np.inf
    values = table[finite.all(axis=1)]
    if not (is_nats := NATS.fullmatch(tag)) and (values.to_numpy() > 0).all():
        values = pd.DataFrame(np.log(values))
    difference = values.iloc[:, 0] - values.iloc[:, 1]
    difference -= difference.expanding(FEWEST).median().shift()
    spread = 1.4826 * difference.abs().expanding(FEWEST).median().shift()
    smallest = LOSS_NATS if is_nats else np.log(FACTOR)
    beyond = (difference.abs() > np.maximum(LIMIT * spread, smallest)) & spread.notna()
    one_sided = (finite.iloc[:, 0] != finite.iloc[:, 1])[~finite.all(axis=1)]
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
    own, other = map(float, table.loc[step])
    spreads = size / width if width else np.inf
    return {"tag": tag, "step": step, "run": own, "reference": other, "spread": width, "spreads": spreads}


def apart(run: Log, reference: Log) -> list[dict[str, Any]]:
    """Return the losses that are apart to the end, the first one first; also of runs that differ from the first step.

    A row has ``tag``; ``step``, from which on the loss is apart; whether it is the ``first`` common one; ``run`` and
    ``reference``, the medians of the last values, in nats.

    A loss is apart where the median of the difference over a twentieth of the common steps (at least `HOLD`) stays
    above `LOSS_NATS` and above `LIMIT` of its standard errors. The noise is that of successive differences, so
    batches of different seeds are allowed; a slow series such as a norm has no such noise and is not compared.
    """
    found = []
    losses = {tag: table for tag, table in _both(run, reference).items() if re.fullmatch(r"loss(/.*)?", tag)}
    for tag, values in losses.items():
        table = values[(values.abs() < np.inf).all(axis=1)]
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
        own, other = table.iloc[-width:].median().tolist()
        found.append({"tag": tag, "step": step, "first": since == 0, "run": own, "reference": other})
    return sorted(found, key=lambda one: one["step"])


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


def gradient_growth(log: Log) -> pd.DataFrame:
    """Return where the growth of grad_norm² came from, from the series ``grad_norm/PARAMETER``.

    A row per ``group`` of parameters (`GROUPS`), the largest share first: sums of the mean squared gradient norms
    ``before`` and ``after`` (in the second and the last tenth of the logged steps), ``growth``, and its ``share``.
    """
    parameters = [str(tag) for tag in log.metrics if str(tag).startswith("grad_norm/")]
    squares = log.metrics[parameters].replace(np.inf, np.nan).dropna(how="all") ** 2
    tenth = (len(squares) - 1) / 10
    ends = {"before": (round(tenth), round(2 * tenth)), "after": (round(9 * tenth), round(10 * tenth))}
    table = pd.DataFrame({name: squares.iloc[first : last + 1].mean() for name, (first, last) in ends.items()})
    of = [next((g for g, p in GROUPS.items() if re.search(p, tag[10:].lower())), "other") for tag in parameters]
    groups = table.groupby(pd.Index(of, name="group")).sum()
    groups["growth"] = groups["after"] - groups["before"]
    groups["share"] = groups["growth"] / groups["growth"].sum()
    return groups.sort_values("share", ascending=False).reset_index()
