"""What `attach` prints and writes: the line after the first probe, warnings, the numbers of a run, and its alarms."""

from __future__ import annotations

import contextlib
import statistics
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmqk.monitors.foreign.layers import Layers
from mmqk.monitors.foreign.measurement import CallRecord
from mmqk.monitors.foreign.probe import Prober
from mmqk.monitors.formulas.reduce import over_layers
from mmqk.store import Alarm, AlarmRules, append_alarms
from mmqk.store.alarms import truncate_alarms
from mmqk.store.errors import UserError
from mmqk.store.files import write_json
from mmqk.store.folder import STATUS_NAME
from mmqk.store.formatting import percent, plain, some
from mmqk.store.metrics import METRICS_NAME, MetricsWriter, last_metrics, parse_tag

Log = Callable[..., Any]  # called as log({tag: number}, step=int)


def summary_parts(
    prober: Prober, tokens: Mapping[str, int], seconds: float, step_seconds: Sequence[float], every_n_steps: int
) -> list[str]:
    """Return the parts of the summary line: layers with measured attention, tokens by modality, cost of the first
    probe, and calls without statistics.

    Args:
        prober: has the layers and the attention calls of the first probe.
        tokens: number of tokens of each modality.
        seconds: duration of the first probe.
        step_seconds: durations of the optimizer steps so far.
        every_n_steps: steps between probes.
    """
    cost = f"first probe (includes warm-up) {plain(1000 * seconds)} ms"
    if step_seconds:
        share = seconds / statistics.median(step_seconds)
        cost += f", {percent(share, 3)} of a step, {percent(share / every_n_steps)} of training"
    of_modality = "tokens " + ", ".join(f"{n} {name}" for name, n in tokens.items())
    assert prober.layers is not None
    return [_layers_part(prober.layers, prober.records), of_modality, cost, *_notes(prober.records)]


# Statistics that need more than the attention calls. All but the last have one value for each layer.
SERIES = (
    "attn_in_norm", "q_raw_norm", "k_raw_norm", "q_weight_gain", "k_weight_gain", "attn_out_norm", "mlp_out_norm",
    "resid_norm", "final_norm",
)  # fmt: skip


def missing_series(tags: Collection[str], names: Collection[str]) -> str:
    """Return a note of the `SERIES` that were not measured, or not in all layers; empty if none is missing.

    Args:
        tags: the measured tags.
        names: names of the modalities.
    """
    measured = {(tag.statistic, tag.layer) for tag in map(parse_tag, tags) if tag.modality in names}
    count = Counter(statistic for statistic, _ in measured)
    layers = count["q_norm"]
    absent = [name for name in SERIES if not count[name]]
    absent += [f"{n} in {layers - count[n]} of {layers} layers" for n in SERIES[:-1] if 0 < count[n] < layers]
    note = f"statistics not measured: {', '.join(absent)} (pass an adapter that names their modules)"
    return note if absent else ""


def warn_of_absent(tokens: Mapping[str, int]) -> None:
    """Warn of modalities without tokens: a wrong id range is more likely than a batch without that modality."""
    absent = [name for name, n in tokens.items() if not n]
    if absent:
        warnings.warn(
            f"mmqk: the first probe has no {' and no '.join(absent)} tokens, but {sum(tokens.values())} of other "
            "modalities: check the ids or the function that you passed as modality",
            stacklevel=5,
        )


NOTABLE_MASS = 1e-6  # mass from which `warn_of_mass` warns
# What the warning says about attention on each kind of keys that no query should attend to.
MASS_WARNINGS = {
    "attn_mass_hidden": (
        "the attention logits outgrow an additive mask, and {} of the attention is on keys that it hides ({}): hide "
        "keys with -inf or a bool mask"
    ),
    "attn_mass_padding": "{} of the attention is on padding ({}): pass the padding mask to the attention",
    "attn_mass_documents": (
        "{} of the attention is on other packed documents ({}): separate the documents in the attention mask"
    ),
}


def warn_of_mass(values: Mapping[str, float], step: int, warned: set[str]) -> None:
    """Warn once of attention on hidden keys, on padding, and on other documents; add the statistics to ``warned``."""
    for statistic, text in MASS_WARNINGS.items():
        masses = {tag: x for tag, x in values.items() if parse_tag(tag).statistic.endswith(statistic)}
        worst = max(masses, key=masses.__getitem__, default="")
        if worst and masses[worst] > NOTABLE_MASS and statistic not in warned:
            warned.add(statistic)
            warnings.warn(f"mmqk: at step {step} {text.format(percent(masses[worst], 3), worst)}", stacklevel=5)


def _layers_part(layers: Layers, records: Sequence[CallRecord]) -> str:
    if not layers.total and records:
        return "attention measured in no layer"
    if not layers.total:
        return (
            "no attention call detected (attach detects torch's scaled_dot_product_attention, flex_attention and "
            "varlen_attn, flash_attn, and the eager attention of transformers)"
        )
    text = f"attention measured in {layers.seen} of {layers.total} layers"
    if layers.hidden:
        advice = "; F.scaled_dot_product_attention outside torch.jit is measured" if layers.by_hand else ""
        text += f", not in {', '.join(layers.hidden)} (maxima over layers leave these out{advice})"
    return text


def _notes(records: Sequence[CallRecord]) -> list[str]:
    """Return a note for each reason why calls or their weights were not measured, and one for cross-attention."""
    paths: dict[str, list[str]] = defaultdict(list)
    for record in records:
        if record.not_measured is not None:
            paths[f"not measured ({record.not_measured})"].append(record.path)
            continue
        if record.cross:
            paths["cross-attention measured"].append(record.path)
        if record.no_weights is not None:
            paths[f"without entropy, mass and rank ({record.no_weights})"].append(record.path)
    return [f"{note}: {some(of_note, 1)}" for note, of_note in paths.items()]


class Output:
    """Writes, logs and checks the numbers of a watch; only the first rank calls it.

    Args:
        path: the folder of ``metrics.jsonl``, ``alarms.jsonl`` and ``status.json``; or None.
        log: called as ``log({tag: number}, step=int)`` with the numbers and their reductions over layers; or None.
        rules: the rules of docs/alarms.md, with the length of the run and of its warm-up.
        on_alarm: called with each alarm; or None. The first alarm of each kind is also printed.
    """

    def __init__(self, path: Path | None, log: Log | None, rules: AlarmRules, on_alarm: Callable[[Alarm], Any] | None):
        self.path, self.log, self.rules, self.on_alarm = path, log, rules, on_alarm
        self._writer: MetricsWriter | None = None
        self._printed: set[tuple[str, str, str | None]] = set()  # kinds of alarms
        self._warned: set[str] = set()  # statistics of `warn_of_mass`
        self._failed = False  # a write failed, and this was printed

    def start(self, resumed: int) -> None:
        """Open the folder, which is created if missing, before the first step.

        A resumed run removes the lines and alarms after the step ``resumed``; it is 0 for a new run.

        Raises:
            UserError: the folder has steps of another run, or cannot be written.
        """
        if self.path is None:
            return
        file = self.path / METRICS_NAME
        last = last_metrics(file).get("step")
        if last is not None and not resumed:
            raise UserError(
                f"{file} has a run up to step {last}: give another folder, or set watch.steps to the step that this "
                "run resumes from"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._writer = MetricsWriter(file)
        except OSError as error:
            raise UserError(f"{self.path} cannot be written ({error}): give another folder") from error
        self._writer.truncate_after(resumed)
        truncate_alarms(self.path, resumed)
        self._status("running", resumed)

    def write(self, step: int, values: Mapping[str, float], is_present: bool, site: str | None) -> None:
        """Write the numbers of a step by tag, and check them for alarms.

        Args:
            step: optimizer step.
            values: all numbers of the step.
            is_present: whether this is the present step, whose numbers are logged, and not an earlier one.
            site: the first place with a value that is not finite, if it was looked for.
        """
        warn_of_mass(values, step, self._warned)
        if self._writer is not None:
            with self._going_on(step):
                self._writer.write(step, values)
                self._writer.flush()
                self._status("running", step)
        if self.log is not None and is_present:
            self.log({**values, **over_layers(values)}, step=step)
        for alarm in self.rules.update(step, values):
            if alarm.name == "non_finite" and site:
                alarm = replace(alarm, sentence=f"{alarm.sentence}; the first is {site}")
            if self._writer is not None and self.path is not None:
                with self._going_on(step):
                    append_alarms(self.path, [alarm])
            parsed = parse_tag(alarm.tag)
            kind = (alarm.name, parsed.statistic, parsed.modality)
            if kind not in self._printed:
                self._printed.add(kind)
                print(f"mmqk: alarm at {alarm.line()}", flush=True)
            if self.on_alarm is not None:
                self.on_alarm(alarm)

    def close(self, step: int, status: str) -> None:
        """Close the metrics file and write the final status."""
        if self._writer is not None:
            with self._going_on(step):
                self._writer.close()
            with self._going_on(step):
                self._status(status, step)

    @contextlib.contextmanager
    def _going_on(self, step: int) -> Iterator[None]:
        """Print the first error of writing, such as a full disk, which must not end the training."""
        try:
            yield
        except OSError as error:
            if not self._failed:
                print(f"mmqk: numbers of step {step} are not written, training goes on: {error}", flush=True)
            self._failed = True

    def _status(self, status: str, step: int) -> None:
        assert self.path is not None
        write_json(self.path / STATUS_NAME, {"status": status, "step": step})
