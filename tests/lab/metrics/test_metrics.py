"""Compare the metrics of claims with planted numbers."""

import json
import math
from collections import defaultdict
from pathlib import Path

import norm_competition_check as check
import numpy as np
import pytest

import mmqk
from mmqk.lab.metrics import METRICS
from mmqk.lab.metrics.outcomes import best_loss, final_loss, initial_loss, is_trained, learned, unigram_entropy
from mmqk.lab.runs import read_runs
from tests.lab.fake_runs import UNIGRAM, Planted, write_run
from tests.lab.small_runs import small_run

largest_attention_logit = METRICS["largest_attention_logit"].measure
PACK = Path(__file__).parents[3] / "reports/examples/norm_competition_large.zip"


def run_of(tmp_path, planted, **kwargs):
    write_run(tmp_path / "x", planted, **kwargs)
    return read_runs(tmp_path)[0]


def append(tmp_path, text):
    with open(tmp_path / "x" / "metrics.jsonl", "a") as file:
        file.write(text + "\n")
    return read_runs(tmp_path)[0]


def test_largest_logit_is_the_median_of_the_last_three_probes(tmp_path):
    run = run_of(tmp_path, Planted(50.0, spread=0))
    assert largest_attention_logit(run) == pytest.approx(50.0)
    # One outlier among the last three probes does not change the median; two outliers do.
    run = append(tmp_path, '{"step": 220, "attn_logit_absmax/text-text/layer00": 9000}')
    assert largest_attention_logit(run) == pytest.approx(50.0)
    run = append(tmp_path, '{"step": 240, "attn_logit_absmax/text-text/layer00": 8000}')
    assert largest_attention_logit(run) == pytest.approx(8000)


@pytest.mark.parametrize(
    ("probes", "end"),
    [
        ({0: 2.0}, 2.0),  # the only probe
        ({0: 2.0, 40: 64.0}, 64.0),
        ({0: 2.0, 20: 8.0, 40: 64.0}, 36.0),  # the median of 8 and 64
        ({0: 2.0, 20: 8.0, 40: 16.0, 60: 64.0}, 16.0),
        ({100: 2.0, 120: 8.0, 140: 64.0}, 8.0),  # a fork: its first probe is not of an untrained model
    ],
)
def test_the_end_of_a_short_run_has_no_probe_of_the_untrained_model(tmp_path, probes, end):
    run = small_run(tmp_path / "x", {f"{name}/text": probes for name in ("final_norm", "q_norm")})
    assert METRICS["final_norm"].measure(run, "text") == end
    # The independent script has the same rule.
    rows = [{"step": step, "q_norm/text": x, "final_norm/text": x} for step, x in probes.items()]
    assert math.exp(check.value("final_norm/text", rows, True)) == pytest.approx(end)


@pytest.mark.slow
def test_the_independent_script_measures_the_norms_of_a_shipped_pack_as_mmqk_does():
    metrics = {(name, modality) for name in check.REDUCED for modality in ("text", "image", "")}
    names = {f"{name}/{modality}" if modality else name for name, modality in metrics}
    arms, _ = check.load(check.reader(PACK), names, defaultdict(str))
    for run in list(mmqk.load_runs(PACK))[:5]:
        theirs = arms[run.arm][run.seed]
        for name, modality in metrics:
            ours = math.log(METRICS[name].measure(run, modality or None))
            assert theirs[f"{name}/{modality}" if modality else name] == pytest.approx(ours, rel=1e-9), name
        grown = np.transpose(theirs["weights"])
        for column, modality in zip(grown[1:], ("text", "image", None), strict=False):
            if modality in (None, *theirs["trained"]):
                assert column == pytest.approx(METRICS["weight_growth"].series(run, modality)[1])


def test_nan_ranks_worst_and_what_was_seen_is_known(tmp_path):
    run = run_of(tmp_path, Planted(50.0, spread=0, nan_from=160))
    assert largest_attention_logit(run) == math.inf
    seen = METRICS["largest_attention_logit"].worst_seen(run, None)
    assert 30 < seen < 50
    assert METRICS["attention_entropy"].measure(run, "text") == -math.inf


@pytest.mark.parametrize("last", ["nan", "inf", "-inf"])
def test_a_last_value_that_is_not_finite_is_worst_whatever_came_before(tmp_path, last):
    run_of(tmp_path, Planted(50.0, spread=0))
    run = append(
        tmp_path,
        f'{{"step": 205, "attn_logit_absmax/text-text/layer00": "{last}", "attn_entropy/text/layer00": "{last}"}}',
    )
    if last != "-inf":
        assert largest_attention_logit(run) == math.inf
    assert METRICS["attention_entropy"].measure(run, "text") == -math.inf
    # The control: followed by two finite probes, the value is one outlier among the last three.
    for step in (206, 207):
        run = append(
            tmp_path, f'{{"step": {step}, "attn_logit_absmax/text-text/layer00": 7, "attn_entropy/text/layer00": 2}}'
        )
    assert largest_attention_logit(run) == 7 and METRICS["attention_entropy"].measure(run, "text") == 2


def test_diverged_run_counts_as_what_was_measured(tmp_path):
    run = run_of(tmp_path, Planted(700.0, spread=0, diverges=140, validated=False))
    assert largest_attention_logit(run) == pytest.approx(700.0)


def test_a_run_without_probes_was_not_measured(tmp_path):
    run = small_run(tmp_path / "x", {"loss/text": [3.0]})
    assert math.isnan(largest_attention_logit(run))
    assert math.isnan(METRICS["largest_attention_logit"].worst_seen(run, None))
    assert math.isnan(final_loss(run, "image").value)


def test_final_loss_is_held_out_only_at_the_end_of_a_completed_run(tmp_path):
    planted = {"text": 3.4, "image": 4.6}
    completed = final_loss(run_of(tmp_path / "a", Planted(50.0, planted)), "text")
    assert completed.held_out and completed.value == pytest.approx(3.4)
    stopped = final_loss(run_of(tmp_path / "b", Planted(50.0, planted, status="interrupted")), "text")
    assert not stopped.held_out and stopped.value == pytest.approx(3.46, abs=0.05)
    run_of(tmp_path / "c", Planted(50.0, planted, status="interrupted"))
    assert final_loss(append(tmp_path / "c", '{"step": 201, "loss/text": "nan"}'), "text").value == math.inf


def test_a_held_out_loss_of_an_earlier_step_is_not_final(tmp_path):
    run_of(tmp_path, Planted(50.0, {"text": 3.4, "image": 4.6}))
    status = tmp_path / "x" / "status.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"step": 260}))
    lines = "\n".join(json.dumps({"step": step, "loss/text": 3.0}) for step in range(201, 261))
    found = final_loss(append(tmp_path, lines), "text")
    assert not found.held_out and found.value == pytest.approx(3.0)
    found = final_loss(append(tmp_path, '{"step": 260, "val_loss/text": 3.1}'), "text")
    assert found.held_out and found.value == 3.1


def test_learned_is_measured_against_the_unigram_entropy(tmp_path):
    low = {"text": UNIGRAM["text"] - 0.15, "image": UNIGRAM["image"] - 0.05}
    run = run_of(tmp_path / "a", Planted(50.0, low))
    assert unigram_entropy(run, "text") == UNIGRAM["text"]
    assert learned(run, "text")
    assert not learned(run, "image")


def test_learned_falls_back_on_the_loss_at_initialization(tmp_path):
    low = {"text": UNIGRAM["text"] - 0.15, "image": 6.28}
    run = run_of(tmp_path, Planted(50.0, low, validated=False), unigram=False)
    assert math.isnan(unigram_entropy(run, "text"))
    assert initial_loss(run, "text") == pytest.approx(6.9, abs=0.2)
    assert best_loss(run, "text") == pytest.approx(low["text"], abs=0.05)
    assert learned(run, "text")
    assert not learned(run, "image")


def test_a_modality_without_a_loss_is_not_trained(tmp_path):
    run = run_of(tmp_path, Planted(50.0))
    assert not is_trained(run, "audio")
    path = tmp_path / "x" / "metrics.jsonl"
    path.write_text(path.read_text().replace("loss/image", "other"))
    run = read_runs(tmp_path)[0]
    assert is_trained(run, "text") and not is_trained(run, "image")


def test_norms_weigh_layers_and_modalities_alike(tmp_path):
    norms = {"text/layer00": 1, "text/layer01": 3, "image/layer00": 5, "image/layer01": 7}
    run = small_run(tmp_path / "x", {f"q_norm/{place}": [norm] for place, norm in norms.items()})
    assert METRICS["q_norm"].measure(run, None) == 4 and METRICS["q_norm"].measure(run, "image") == 6


def test_the_product_of_norms_is_the_geometric_mean_over_layers(tmp_path):
    norms = {"q_norm/text/layer00": 2, "k_norm/text/layer00": 3, "q_norm/text/layer01": 8, "k_norm/text/layer01": 1}
    norms |= {f"{norm}_norm/image/layer0{layer}": 1000 for norm in "qk" for layer in (0, 1)}
    series = {tag: [norm] * 3 for tag, norm in norms.items()}
    measure = METRICS["qk_norm_product"].measure
    run = small_run(tmp_path / "x", series)
    assert measure(run, "text") == pytest.approx(math.sqrt(2 * 3 * 8 * 1))
    # The control: the product of the arithmetic means differs. Without a modality, the metric is the geometric mean
    # of the values of text and image, with equal weights.
    assert measure(run, "text") != pytest.approx((2 + 8) / 2 * (3 + 1) / 2, rel=0.1)
    assert measure(run, None) == pytest.approx(math.sqrt(math.sqrt(48) * 1000**2))
    assert math.isnan(measure(run, "audio"))
    absent = small_run(tmp_path / "absent", series | {"k_norm/text/layer01": [1.0, 1.0]})
    assert METRICS["qk_norm_product"].series(absent, "text")[1][-1] == pytest.approx(4 * 3)
    nan = small_run(tmp_path / "nan", series | {"k_norm/text/layer01": [1.0, 1.0, math.nan]})
    assert measure(nan, "text") == math.inf


def test_a_loss_that_is_off_is_not_trained(tmp_path):
    run = run_of(tmp_path, Planted(50.0), settings={"loss.weights.image": 0.0})
    assert not is_trained(run, "image")
    assert is_trained(run, "text")


@pytest.mark.parametrize(
    ("mix", "trained"),
    [
        ({"pair": 3.0, "text": 1.0}, ["text", "image"]),
        ({"tokens": 1.0}, ["text", "image"]),
        ({"dial": 0.0, "text": 1.0}, ["text"]),
        ({"image": 1}, ["image"]),
        ({"pair": 0.0, "text": 0, "image": 2.0}, ["image"]),
    ],
)
def test_what_the_data_mix_does_not_hold_is_not_trained(tmp_path, mix, trained):
    run = run_of(tmp_path, Planted(50.0), settings={"data": {"mix": mix}})
    assert [m for m in ("text", "image") if is_trained(run, m)] == trained
