"""How early do monitors tell which runs of the late grid fail? Prints the tables of docs/late_divergence.md.

    python docs/experiments/late_prediction.py runs/late        (or the pack reports/examples/late.zip)

First table: for each alarm rule and arm, how many runs had an alarm before their failure or end, how many alarms per
1,000 steps, and how long before the failure the first one came. Second table: for each monitor at a fixed step, the
AUROC of its value for failing against surviving runs of one arm without QK-Norm, and the Spearman correlation with
the step of the failure over its failing runs. Third table: how far the loss of each modality had risen when a run
ended. Fourth table: the number of runs that fail at other thresholds of the two rules. Fifth table: how many layers
have large logits, the attention entropy of text queries, and how many steps the gradient clipping scales, by arm and
step. Sixth table: the losses at the end of the runs of 10,000 steps, and how far they are above those of the same
seed with QK-Norm and without a remedy. Seventh table: the time to failure of the text loss alone in runs that are not
stopped, against an arm without an image loss, tested as the registered claims are. Eighth table: how far the image
loss of a stopped run rose, how far that of the run with QK-Norm, which has the same batches, rose over the same
steps, and the correlation of the two in the 1,000 steps before the stop.
"""

import itertools
import sys

import numpy as np
from scipy import stats

import mmqk
from mmqk.lab.metrics import outcomes
from mmqk.lab.metrics.outcomes import divergence_step, failure_step, trained_modalities, window_means

RULES = ("spike", "spike_median", "growth", "collapse", "stall")
# Monitor: statistic, reduction over layers and modalities, and the width of the window before the step.
MONITORS = {
    "largest attention logit": ("attn_logit_absmax", np.max, 1),
    "lowest attention entropy": ("attn_entropy", np.min, 1),
    "lowest stable rank of W_q": ("w_q_stable_rank", np.min, 1),
    "largest norm of the last layer": ("final_norm", np.max, 1),
    "largest gradient norm of 500 steps": ("grad_norm", np.max, 500),
    "loss, mean of 500 steps": ("loss", np.mean, 500),
}


def value_at(run, step, statistic, reduce, width):
    """Return the monitor of a run at a step; NaN if the run has none there."""
    steps, values = run.series("loss") if statistic == "loss" else run.combined(statistic, reduce)
    before = np.flatnonzero((steps <= step) & (steps > step - width if width > 1 else True))
    before = before if width > 1 else before[-1:]
    return float(reduce(values[before])) if len(before) else np.nan


def spread(values):
    return f"{np.median(values):,.0f} ({min(values):,} to {max(values):,})" if len(values) else "–"


def alarm_rows(runs, failed):
    for arm in dict.fromkeys(run.arm for run in runs):
        of_arm = [run for run in runs if run.arm == arm]
        failing = [run for run in of_arm if failed[run.name]]
        for rule in RULES:
            steps, lead, count, length = {}, [], 0, 0
            for run in of_arm:
                end = failed[run.name] or run.last_step
                at = [alarm.step for alarm in run.alarms if alarm.name == rule and alarm.step < end]
                count, length = count + len(at), length + end
                if at:
                    steps[run.name] = min(at)
                    lead += [end - min(at)] if run in failing else []
            others = len(of_arm) - len(failing)
            yield (
                arm,
                rule,
                f"{sum(run.name in steps for run in failing)} of {len(failing)}",
                f"{len(steps) - len(lead)} of {others}",
                f"{1000 * count / length:.2g}",
                spread(lead),
            )


def auroc(values, failing):
    values, failing = np.array(values), np.array(failing, dtype=bool)
    kept = ~np.isnan(values)
    bad, good = values[kept & failing], values[kept & ~failing]
    if not len(bad) or not len(good):
        return "–"
    return f"{stats.mannwhitneyu(bad, good).statistic / (len(bad) * len(good)):.2f} ({len(bad)} and {len(good)})"


def monitor_rows(runs, failed):
    """Compare runs of the same arm only: between arms a monitor may differ for other reasons than the failure."""
    for arm in dict.fromkeys(run.arm for run in runs if run.setting("model.qk_norm.kind") == "none"):
        of_arm = [run for run in runs if run.arm == arm]
        failures = [failed[run.name] for run in of_arm if failed[run.name]]
        if not failures:
            continue
        for share in (0.2, 0.4, 0.6):
            step = round(share * np.median(failures) / 250) * 250
            alive = [run for run in of_arm if not failed[run.name] or failed[run.name] > step]
            for name, monitor in MONITORS.items():
                values = {run.name: value_at(run, step, *monitor) for run in alive}
                dying = [run.name for run in alive if failed[run.name]]
                rho = "–"
                if len(dying) > 3:
                    pairs = [values[n] for n in dying], [failed[n] for n in dying]
                    found = stats.spearmanr(*pairs, nan_policy="omit")
                    rho = f"{found.statistic:.2f} (p = {found.pvalue:.2g}, n = {len(dying)})"
                yield arm, f"{step:,}", name, auroc(list(values.values()), [bool(failed[r.name]) for r in alive]), rho


def loss_rows(runs, failed):
    for run in runs:
        if not failed[run.name]:
            continue
        for modality in trained_modalities(run):
            values = run.series(f"loss/{modality}")[1]
            best = window_means(run, modality)[1].min()
            yield run.arm, str(run.seed), modality, f"{best:.2f}", f"{np.mean(values[-50:]) - best:+.2f}"


def medians(run, modality):
    """Return the last steps and the medians of all windows of 50 steps."""
    steps, losses = run.series(f"loss/{modality}")
    return steps[49:], np.median(np.lib.stride_tricks.sliding_window_view(losses, 50), axis=1)


def above_lowest(run, modality):
    """Return the same steps, and how far each median is above the lowest one before it."""
    steps, values = medians(run, modality)
    return steps, values - np.minimum.accumulate(values)


def text_failure(run, rule):
    """Return the step of the lasting rise of the text loss or, with the divergence rule, of its divergence, whichever
    is first, as a share of 10,000 steps; 1 without failure."""
    steps, above = above_lowest(run, "text")
    diverged = steps[above > 0.5][:1].tolist() if rule else []
    return min([10_000, *diverged, *filter(None, [outcomes.rise_step(run, "text")])]) / 10_000


def text_rows(runs):
    """The controls of `late` never fail, so Welch's interval is that of one sample against 1."""
    for rule in (False, True):
        mixed, *controls = (
            [text_failure(run, rule) for run in runs if run.arm == arm]
            for arm in ("mixed-on", "image-off", "text-only", "images-removed")
        )
        assert all(set(control) == {1.0} for control in controls)
        test = stats.ttest_1samp(mixed, 1)
        low, high = test.confidence_interval()
        censored = [stats.CensoredData.right_censored(times, np.equal(times, 1)) for times in (mixed, controls[0])]
        yield (
            "lasting rise or divergence" if rule else "lasting rise",
            f"{np.mean(mixed) - 1:+.3f} ({low - 1:.3f} to {high - 1:.3f})",
            f"{stats.ttest_1samp(mixed, 0.9).pvalue:.2g}",
            f"{stats.logrank(*censored).pvalue:.2g}",
        )


def batch_rows(runs):
    twins = {run.seed: run for run in runs if run.arm == "mixed-qk"}
    for run in (run for run in runs if run.arm in ("mixed", "third") and run.status.status == "diverged"):
        stop = divergence_step(run)
        steps, values = medians(run, "image")
        until = steps <= stop
        lowest = steps[until][np.argmin(values[until])]
        rises = []
        for one in (run, twins[run.seed]):
            at = dict(zip(*medians(one, "image"), strict=True))
            rises.append(f"{at[stop] - at[lowest]:+.2f}")
        before = [
            losses[(steps <= stop) & (steps > stop - 1000)]
            for steps, losses in (one.series("loss/image") for one in (run, twins[run.seed]))
        ]
        yield run.arm, str(run.seed), f"{lowest:,}", f"{stop:,}", *rises, f"{np.corrcoef(*before)[0, 1]:.2f}"


def threshold_rows(runs):
    for arm in dict.fromkeys(run.arm for run in runs):
        of_arm = [run for run in runs if run.arm == arm]
        highest = [max(above_lowest(run, m)[1].max() for m in trained_modalities(run)) for run in of_arm]
        row = [f"{min(highest):.2f} to {max(highest):.2f}"]
        row += [str(sum(value > nats for value in highest)) for nats in (0.4, 0.5, 0.6, 0.8)]
        for nats in (0.05, 0.1, 0.15, 0.2):
            outcomes.ABOVE_OWN_BEST_NATS = nats
            row.append(str(sum(outcomes.rise_step(run, "text") is not None for run in of_arm)))
        outcomes.ABOVE_OWN_BEST_NATS = 0.1
        for window, fewest in ((500, 3), (1000, 2)):
            outcomes.WINDOW_STEPS, outcomes.FEWEST_WINDOWS_ABOVE = window, fewest
            row.append(str(sum(outcomes.rise_step(run, "text") is not None for run in of_arm)))
        outcomes.WINDOW_STEPS, outcomes.FEWEST_WINDOWS_ABOVE = 500, 2
        yield arm, str(len(of_arm)), *row


def layer_rows(runs):
    """The logit of a layer is its largest, over queries and keys, and its entropy the mean over queries of text; both
    are medians of three probes."""
    for arm in dict.fromkeys(run.arm for run in runs):
        for step in (1000, 3000, 5000, 7000, 10000, 15000, 20000):
            alive = [run for run in runs if run.arm == arm and run.last_step >= step > first_step(run)]
            if not alive:
                continue
            logits, entropies, clipped = [], [], []
            for run in alive:
                layers = range(run.setting("model.n_layers"))
                by_layer = [run.combined("attn_logit_absmax", np.max, layer=layer) for layer in layers]
                logits.append([last_three(series, step) for series in by_layer])
                by_layer = [run.combined("attn_entropy", np.min, modality="text", layer=layer) for layer in layers]
                entropies.append(np.median([last_three(series, step) for series in by_layer]))
                steps, norms = run.series("grad_norm")
                clipped.append(100 * np.mean(norms[(steps <= step) & (steps > step - 500)] > 1))
            logits = np.array(logits)
            columns = (logits.max(1), np.median(logits, 1), (logits > 1000).sum(1), entropies, clipped)
            yield arm, f"{step:,}", str(len(alive)), *(f"{min(c):.3g} to {max(c):.3g}" for c in columns)


def final_loss(run, modality, held_out):
    values = run.series(f"{'val_loss' if held_out else 'loss'}/{modality}")[1]
    return values[-1] if held_out else np.mean(values[-500:])


def final_rows(runs):
    by_seed = {(run.arm, run.seed): run for run in runs if run.last_step == 10_000}
    for arm, held_out, modality in itertools.product(
        dict.fromkeys(arm for arm, _ in by_seed), (True, False), ("text", "image")
    ):
        seeds = [seed for other, seed in by_seed if other == arm]
        if modality not in trained_modalities(by_seed[arm, seeds[0]]):
            continue
        references = ("text-qk", "text-only") if arm.startswith("text") else ("mixed-qk", "mixed-on")
        row = [[final_loss(by_seed[arm, seed], modality, held_out) for seed in seeds]]
        for reference in references:
            pairs = [(by_seed[arm, seed], by_seed.get((reference, seed))) for seed in seeds]
            row.append([final_loss(run, modality, held_out) - final_loss(other, modality, held_out)
                        for run, other in pairs if other])  # fmt: skip
        kind = f"{modality}, {'held-out' if held_out else 'training'}"
        yield arm, kind, str(len(seeds)), *(f"{min(v):.2f} to {max(v):.2f}" if v else "–" for v in row)


def last_three(series, step):
    """Return the median of three probes, which are 250 steps apart."""
    steps, values = series
    return np.median(values[(steps <= step) & (steps > step - 750)])


def first_step(run):
    return (run.fork or {}).get("step", 0)


def table(titles, rows):
    print("| " + " | ".join(titles) + " |\n" + "| --- " * len(titles) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


if __name__ == "__main__":
    runs = [run for run in mmqk.load_runs(sys.argv[1]) if run.status.finished and run.role == "verdict"]
    failed = {run.name: failure_step(run) for run in runs}
    table(
        ["arm", "alarm", "failed runs", "other runs", "alarms in 1,000 steps", "steps before the failure"],
        alarm_rows(runs, failed),
    )
    if any(failed.values()):
        auroc_title, rho_title = "AUROC (failing and surviving runs)", "correlation with the time of the failure"
        titles = ["arm", "step", "monitor", auroc_title, rho_title]
        table(titles, monitor_rows(runs, failed))
        titles = ["arm", "seed", "loss", "lowest mean of 500 steps", "mean of the last 50 steps above it"]
        table(titles, loss_rows(runs, failed))
    titles = ["highest median above its lowest (nat)"]
    titles += [f"median {nats} nat above its lowest" for nats in (0.4, 0.5, 0.6, 0.8)]
    titles += [f"text loss rises {nats} nat for good" for nats in (0.05, 0.1, 0.15, 0.2)]
    titles += ["0.1 nat, in 3 means", "0.1 nat, means of 1,000 steps"]
    table(["arm", "runs", *titles], threshold_rows(runs))
    titles = ["largest logit", "median over layers", "layers above 1,000", "median text entropy"]
    titles += ["% of steps clipped"]
    table(["arm", "step", "runs", *titles], layer_rows(runs))
    titles = ["runs", "at the end", "above the same seed with QK-Norm", "above the same seed without a remedy"]
    table(["arm", "loss", *titles], final_rows(runs))
    titles = ["failure of the text loss", "time to failure, mixed minus each other arm (share of 10,000 steps)"]
    table([*titles, "p for 0.1", "log-rank p"], text_rows(runs))
    titles = ["seed", "lowest median at step", "stop", "rise to the stop (nat)", "the same steps with QK-Norm"]
    table(["arm", *titles, "correlation before the stop"], batch_rows(runs))
