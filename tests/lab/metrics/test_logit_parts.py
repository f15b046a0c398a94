"""Test the parts of an attention logit (mean + offset + spread) on random rows of logits."""

import math

import numpy as np
import pytest

from mmqk.lab.metrics import METRICS, find_metric
from tests.lab.small_runs import small_run

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


def test_without_the_series_or_with_one_modality_there_is_no_value(tmp_path):
    run = small_run(tmp_path / "none", {"q_norm/text/layer00": [1.0] * 3})
    assert all(math.isnan(METRICS[name].measure(run, None)) for name in PARTS)
    one = {"attn_mass/text-text/layer00": [1.0] * 3, "attn_logit_offset_var/text/layer00": [0.0] * 3}
    one_run = small_run(tmp_path / "one", one)
    assert math.isnan(METRICS["attention_mass_other"].measure(one_run, "text"))
    offset = METRICS["logit_offset"]
    assert math.isnan(offset.on_scale(offset.measure(one_run, "text")))


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
