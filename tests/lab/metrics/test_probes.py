"""The order of growth, the parts of an attention logit, and the part of the mean squared logit that grew."""

import math

import numpy as np
import pytest

from mmqk.lab.metrics import METRICS, find_metric
from mmqk.lab.metrics.probes import growth_order
from tests.lab.small_runs import small_run

STEPS = range(0, 201, 20)


def run_of(folder, warmup=40, **series):
    """Return a run with these series, given as functions of the step; ``__`` in a name means ``/``."""
    by_step = {name.replace("__", "/"): {step: of(step) for step in STEPS} for name, of in series.items()}
    return small_run(folder, by_step, config={"optim": {"warmup_steps": warmup}} if warmup is not None else {})


def places(run):
    return [(g.statistic, g.modality, g.layer, g.step) for g in growth_order(run)]


def test_series_are_in_the_order_in_which_they_left_for_good(tmp_path):
    run = run_of(
        tmp_path / "run",
        q_norm__text__layer01=lambda step: 1.0 if step < 120 else 2.5,
        k_norm__image__layer00=lambda step: 1.0 if step < 80 else 9.0,
        resid_norm__image__layer01=lambda step: 1.0 if step < 80 else 3.0,
        attn_entropy__text__layer00=lambda step: 3.0 if step < 160 else 1.0,
    )
    assert places(run) == [
        ("k_norm", "image", 0, 80),
        ("resid_norm", "image", 1, 80),
        ("q_norm", "text", 1, 120),
        ("attn_entropy", "text", 0, 160),
    ]
    assert [g.ratio for g in growth_order(run)] == [9.0, 3.0, 2.5, 3.0]


def test_a_calm_run_names_nothing(tmp_path):
    calm = run_of(
        tmp_path / "run",
        q_norm__text__layer01=lambda step: 1.0 + step / 250,  # less than twofold
        attn_entropy__text__layer00=lambda step: 3.0 - step / 200,
        attn_logit_absmax__text_image__layer00=lambda step: 50.0 if step == 100 else 5.0,  # only one large value
        lr=lambda step: 1e-3 * (step + 1),  # not a statistic whose growth counts
    )
    assert places(calm) == []


def test_growth_during_the_warm_up_is_no_growth(tmp_path):
    def risen(step):
        return 1.0 if step < 40 else 4.0

    assert places(run_of(tmp_path / "a", q_norm__text__layer00=risen)) == []
    assert places(run_of(tmp_path / "b", warmup=0, q_norm__text__layer00=risen)) == [("q_norm", "text", 0, 40)]
    assert places(run_of(tmp_path / "c", warmup=None, q_norm__text__layer00=risen)) == [("q_norm", "text", 0, 40)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_beyond(tmp_path, value):
    run = run_of(tmp_path / "run", final_norm__image=lambda step: 1.0 if step < 180 else value)
    (growth,) = growth_order(run)
    assert (growth.step, growth.layer, growth.ratio) == (180, None, math.inf)


def test_it_agrees_with_a_brute_force_search(tmp_path):
    import random

    draw = random.Random(0)
    values = {(layer, step): draw.lognormvariate(0, 0.6) for layer in range(40) for step in STEPS}
    series = {f"k_norm__text__layer{layer:02d}": (lambda step, layer=layer: values[layer, step]) for layer in range(40)}
    expected = set()
    for layer in range(40):
        start = values[layer, 40]
        for step in STEPS:
            if step >= 40 and all(values[layer, later] > 2 * start for later in STEPS if later >= step):
                expected.add((layer, step))
                break
    found = {(g.layer, g.step) for g in growth_order(run_of(tmp_path / "run", **series))}
    assert found == expected and 2 < len(expected) < 40


LAYERS, ROWS, KEYS = 3, 5, 12
PARTS = ("logit_mean", "logit_offset", "logit_spread", "attention_mass_other")


def planted(shift=0.0, seed=0):
    """Return the series of a run with random logits, and the expected values of `PARTS` for each query modality,
    computed by loops over rows and keys.

    ``shift`` is added to the logits of image keys.
    """
    generator = np.random.default_rng(seed)
    block = ["text" if j % 3 else "image" for j in range(KEYS)]
    series, expected = {}, {}
    for query in ("text", "image"):
        means, offsets, spreads, masses = [], [], [], []
        for layer in range(LAYERS):
            mean, offset, spread, mass = [], [], [], {"text": [], "image": []}
            for _ in range(ROWS):
                z = generator.normal(layer - 1.0, 2.0, KEYS) + [shift * (b == "image") for b in block]
                mu = sum(z) / KEYS
                of = {b: np.mean([z[j] for j in range(KEYS) if block[j] == b]) for b in mass}
                mean.append(mu)
                offset.append(sum((of[block[j]] - mu) ** 2 for j in range(KEYS)) / KEYS)
                spread.append(sum((z[j] - of[block[j]]) ** 2 for j in range(KEYS)) / KEYS)
                for b in mass:
                    mass[b].append(sum(np.exp(z[j]) for j in range(KEYS) if block[j] == b) / sum(np.exp(z)))
            at = f"{query}/layer{layer:02d}"
            series[f"attn_logit_mean/{at}"] = [np.mean(mean)] * 3
            series[f"attn_logit_offset_var/{at}"] = [np.mean(offset)] * 3
            series[f"attn_logit_spread_var/{at}"] = [np.mean(spread)] * 3
            for key, values in mass.items():
                series[f"attn_mass/{query}-{key}/layer{layer:02d}"] = [np.mean(values)] * 3
            means.append(np.mean(mean))
            offsets.append(np.mean(offset))
            spreads.append(np.mean(spread))
            masses.append(np.mean(mass["image" if query == "text" else "text"]))
        expected[query] = [math.sqrt(np.mean(np.square(means))), *(math.sqrt(np.mean(v)) for v in (offsets, spreads))]
        expected[query].append(np.mean(masses))
    return series, expected


def test_each_part_is_that_of_the_rows(tmp_path):
    series, expected = planted()
    run = small_run(tmp_path / "run", {name: [float(v) for v in values] for name, values in series.items()})
    for query, numbers in expected.items():
        for name, number in zip(PARTS, numbers, strict=True):
            metric, modality = find_metric(f"{name}/{query}")
            assert metric.measure(run, modality) == pytest.approx(number, rel=1e-12), name
    both = METRICS["logit_offset"].measure(run, None)
    assert both == pytest.approx(math.sqrt(sum(numbers[1] ** 2 for numbers in expected.values()) / 2))
    assert METRICS["attention_mass_other"].measure(run, None) == pytest.approx(
        np.mean([numbers[3] for numbers in expected.values()])
    )


def test_a_shift_of_one_block_moves_the_offset_and_the_mass_but_not_the_spread(tmp_path):
    runs = [small_run(tmp_path / str(shift), planted(shift)[0]) for shift in (0.0, 6.0)]
    first, second = ([METRICS[name].measure(run, "text") for name in PARTS] for run in runs)
    assert second[1] > 2 * first[1] and second[3] > 1.3 * first[3]
    assert second[2] == pytest.approx(first[2], rel=1e-12)


def test_the_mass_is_the_sum_over_all_other_modalities(tmp_path):
    masses = {"text-text": 0.5, "text-image": 0.3, "text-audio": 0.2, "image-image": 1.0}
    run = small_run(tmp_path / "run", {f"attn_mass/{pair}/layer00": [m] * 3 for pair, m in masses.items()})
    assert METRICS["attention_mass_other"].measure(run, "text") == pytest.approx(0.5)
    assert math.isnan(METRICS["attention_mass_other"].measure(run, "image"))


def test_a_last_value_that_is_not_finite_ranks_worst(tmp_path):
    broken = {
        "attn_logit_offset_var/text/layer00": [1.0, 1.0, math.nan],
        "attn_logit_mean/text/layer00": [1.0, 1.0, -math.inf],
        "attn_mass/text-image/layer00": [0.5, 0.5, math.nan],
    }
    run = small_run(tmp_path / "run", broken)
    assert METRICS["logit_offset"].measure(run, "text") == math.inf
    assert METRICS["logit_mean"].measure(run, "text") == math.inf
    assert METRICS["attention_mass_other"].measure(run, "text") == -math.inf


METRIC = METRICS["norms_over_alignment"]
START = (2.0, 3.0, -4.0)


def run_with(folder, parts):
    """Return a run with two layers; ``parts`` are the log power of q, the log power of k and the log alignment."""
    names = ("logit_q_power", "logit_k_power", "logit_alignment")
    return small_run(
        folder, {f"{n}/text-image/layer0{i}": [x] * 3 for n, x in zip(names, parts, strict=True) for i in (0, 1)}
    )


@pytest.mark.parametrize("grew", [(1.0, 1.0, 0.5), (0.2, 0.2, 1.0), (0.5, 0.4, 1.0)])
def test_it_grows_if_norms_explain_more_than_half_of_the_growth(tmp_path, grew):
    first = run_with(tmp_path / "a", START)
    last = run_with(tmp_path / "b", [x + more for x, more in zip(START, grew, strict=True)])
    growth = METRIC.on_scale(METRIC.measure(last, None)) - METRIC.on_scale(METRIC.measure(first, None))
    assert math.isclose(growth, grew[0] + grew[1] - grew[2], abs_tol=1e-9)
    assert (growth > 0) == ((grew[0] + grew[1]) / sum(grew) > 0.5)


def test_log_z_is_the_last_one_on_held_out_data(tmp_path):
    run = small_run(tmp_path / "z", {"val_log_z/text": {0: 6.9, 3: 2.5}, "log_z/text": [9.0, 8.0, 7.0]})
    assert METRICS["final_log_z"].measure(run, "text") == 2.5
    assert math.isnan(METRICS["final_log_z"].measure(run, "image"))


def test_growth_of_matrices_is_relative_to_their_norm_and_per_step(tmp_path):
    """If the text loss makes W 1 % longer in 50 steps, ‖W‖² grows by ln(1.01²) / 0.05 per 1,000 steps."""
    before, after = 3.0, 3.0 * 1.01
    series = {"budget_window": [50.0] * 3}
    for matrix in "qk":
        for layer in ("layer00", "layer01"):
            series[f"w_{matrix}_growth/text/{layer}"] = [after**2 - before**2] * 3
            series[f"w_{matrix}_growth/image/{layer}"] = [-1.0] * 3
            series[f"w_{matrix}_growth_total/{layer}"] = [after**2 - before**2 - 1.0] * 3
            series[f"w_{matrix}_sq/{layer}"] = [after**2] * 3
    run = small_run(tmp_path / "grew", series)
    metric = METRICS["weight_growth"]
    rate = 2 * math.log(after / before) / 0.05
    assert metric.measure(run, "text") == pytest.approx(rate, rel=0.02)
    assert metric.measure(run, "image") == pytest.approx(-1000 / 50 / after**2)
    assert metric.measure(run, None) == pytest.approx(metric.measure(run, "text") + metric.measure(run, "image"))
    series["budget_window"] = [100.0] * 3  # negative control: the same growth in twice as many steps
    slower = small_run(tmp_path / "slower", series)
    assert metric.measure(slower, "text") == pytest.approx(metric.measure(run, "text") / 2)
