"""The other ways of ``mmqk diagnose``: two logs, checkpoints, experiments. Each returns an answer."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import pandas as pd

from mmqk.diagnose.page import Answer, table_lines
from mmqk.store import UserError


def of_pair(options: argparse.Namespace) -> Answer:
    """Say where the first run parts from the second."""
    from mmqk.diagnose.logs import read_log
    from mmqk.diagnose.names import mapping_of
    from mmqk.diagnose.pair import HOLD, apart, at_the_end, differing, gradient_growth, part

    run, reference = (read_log(file, mapping_of(options.map), options.step) for file in options.files)
    partings, fields = part(run, [reference]), differing(run, reference)
    losses, last = apart(run, reference), at_the_end(run, reference)
    tables = {
        "series that part, the first one first": pd.DataFrame(map(asdict, partings)),
        "losses that are apart to the end": pd.DataFrame(map(asdict, losses)),
        f"at the last common step, {last.attrs['step']:,}": last,
        "fields that differ": fields.reset_index(),
    }
    if any(str(tag).startswith("grad_norm/") for tag in run.metrics):
        tables["growth of grad_norm² of the first run, by group"] = gradient_growth(run).groups.reset_index()
    notes = [f"{log.source}: {note}" for log in (run, reference) for note in log.notes]
    title = f"{run.source} and {reference.source} do not part beyond their spread"
    if last.attrs["steps"] < 2 * HOLD:
        title = f"{run.source} and {reference.source} have {last.attrs['steps']} steps in common, too few to compare"
    if losses:
        since = "the first step" if losses[0].first else f"step {losses[0].step:,}"
        title = f"{run.source} is apart from {reference.source} from {since} to the end: {losses[0].tag}"
    if partings:
        first = partings[0]
        title = f"{run.source} parts from {reference.source} at step {first.step:,}: {first.tag}"
    return _answer(title, tables, notes, bool(partings or losses))


def of_models(options: argparse.Namespace) -> Answer:
    """Say what checkpoints show, without a batch or with one."""
    from mmqk.diagnose.models import blocks_of, read_batch, tables_of

    batch = None if options.batch is None else read_batch(options.batch)
    tables, notes, found = tables_of(options.model, batch, blocks_of(options.modality) or None, options.limit)
    title = f"{', '.join(map(str, options.model))}: {'a finding' if found else 'no rule fired'}"
    return _answer(title, tables, notes, found)


def of_experiments(options: argparse.Namespace) -> Answer:
    """Train forks of a run from before its event."""
    from mmqk.diagnose.experiments import run

    if len(options.files) != 1:
        raise UserError("--experiments needs the folder of one run of mmqk: mmqk diagnose runs/mine --experiments")
    if options.step and not options.step.isdecimal():
        raise UserError(f"--step is {options.step}: with --experiments, give the step of the event")
    if bad := [text for text in options.fields if "=" not in text]:
        raise UserError(f"--set {bad[0]} is not of the form FIELD=VALUE")
    fields = dict(text.split("=", 1) for text in options.fields)
    answer = run(options.files[0], int(options.step) if options.step else None, fields)
    return Answer(f"Experiments on {options.files[0]}", answer.lines(), answer.record(), answer.found)


def _answer(title: str, tables: dict[str, pd.DataFrame], notes: list[str], found: bool) -> Answer:
    lines = [line for name, table in tables.items() if len(table) for line in ("", name.upper(), *table_lines(table))]
    plain: dict[str, Any] = {name: table.astype(object).to_dict("records") for name, table in tables.items()}
    return Answer(title, [*lines, "", *notes], {"title": title, "notes": notes, "found": found, **plain}, found)
