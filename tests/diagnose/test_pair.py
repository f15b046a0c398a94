"""Two runs: a planted parting is found at its step, layer and modality, and two seeds of one series do not part."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
from scipy.signal import lfilter

import mmqk
from mmqk.bench.traces import labelled
from mmqk.diagnose.findings import apart, at_the_end, gradient_growth, part
from mmqk.diagnose.logs import Log
from mmqk.store import UserError

STEPS, PROBES = 400, 10
PLANTED = "attn_logit_absmax/image-image/layer02"


def log(metrics: pd.DataFrame, **config) -> Log:
    return Log("run", "simulated", metrics, {}, [], [], config)


def simulated(seed: int, planted: int | None = None) -> Log:
    """A healthy run: slowly varying noise (AR(1)), norms with a growth rate of their own; from ``planted`` on, one
    statistic of one layer grows, and 60 steps later the loss."""
    random, step = np.random.default_rng(seed), np.arange(1, STEPS + 1)

    def noise(size: float, memory: float = 0.9) -> np.ndarray:
        start = [memory * random.normal()]
        return size * lfilter([np.sqrt(1 - memory**2)], [1, -memory], random.normal(size=STEPS), zi=start)[0]

    table = {"loss": 3 + 4 * np.exp(-step / 80) + noise(0.03) + noise(0.05, 0.0), "grad_norm": np.exp(noise(0.2, 0.3))}
    for modality in ("text-text", "image-image"):
        for layer in range(3):
            rate = 1 + 0.1 * random.normal()
            table[f"attn_logit_absmax/{modality}/layer{layer:02d}"] = 5 * np.exp(rate * step / STEPS + noise(0.1, 0.95))
    metrics = pd.DataFrame(table, index=pd.Index(step, name="step"))
    if planted is not None:
        metrics[PLANTED] *= np.exp(np.clip((step - planted) / 30, 0, 3))
        metrics["loss"] += np.clip((step - planted - 60) / 40, 0, 2)
    metrics.loc[step % PROBES != 0, [tag for tag in metrics if "layer" in tag]] = np.nan
    return log(metrics)


def test_a_planted_parting_is_found_at_its_step_layer_and_modality():
    for seed in range(5):
        found = part(simulated(100 * seed + 50, planted=200), simulated(100 * seed))
        first = found[0]
        assert first["tag"] == PLANTED
        assert 200 < first["step"] <= 280 and first["run"] > first["reference"] and first["spreads"] >= 6
        assert [parting["tag"] for parting in found[1:]] == ["loss"]


# Of 200 pairs, none parted.
@pytest.mark.parametrize("pairs", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_two_seeds_of_a_healthy_run_do_not_part(pairs):
    parted = [part(simulated(10 * i), simulated(10 * i + 1)) for i in range(pairs)]
    assert sum(map(bool, parted)) <= 0.03 * pairs


def test_a_loss_that_is_not_finite_parts_at_once_and_a_constant_difference_does_not():
    run, reference = simulated(0), simulated(0)
    run.metrics.loc[STEPS, "loss"] = np.inf  # the last line of the log
    run.metrics["grad_norm"] *= 3
    found = part(run, reference)
    assert [(parting["tag"], parting["step"], parting["spreads"]) for parting in found] == [("loss", STEPS, np.inf)]
    both = simulated(0)
    both.metrics.loc[STEPS, "loss"] = np.inf
    assert part(both, both) == []
    with pytest.raises(UserError, match="no series with a step in common"):
        part(run, log(reference.metrics.set_index(reference.metrics.index + 10_000)))


def test_growth_of_the_gradient_is_that_of_the_head():
    """The numbers of a public report: grad_norm doubles, and 95 % of the growth of its square is the head's."""
    step = np.arange(0, 1001, 10)
    grown = 1 + 3 * step / 1000  # of grad_norm²
    names = {
        "lm_head.weight": 0.95, "model.embed_tokens.weight": 0.01, "model.layers.0.self_attn.q_proj.weight": 0.01,
        "model.layers.0.mlp.gate_proj.weight": 0.01, "model.layers.0.self_attn.q_norm.weight": 0.01,
        "blocks.1.attention.w_g.weight": 0.01,
    }  # fmt: skip
    squares = {f"grad_norm/{name}": 0.2 + share * (grown - 1) for name, share in names.items()}
    metrics = pd.DataFrame({name: np.sqrt(square) for name, square in squares.items()}, index=step)
    metrics["grad_norm"] = np.sqrt(sum(squares.values()))
    growth = gradient_growth(log(metrics)).set_index("group")
    assert growth.share.round(6).to_dict() == {
        "head": 0.95, "embedding": 0.01, "attention": 0.01, "MLP": 0.01, "norms": 0.01, "gates": 0.01,
    }  # fmt: skip
    before, after = 1.2 + 3 * np.arange(0.1, 0.201, 0.01), 1.2 + 3 * np.arange(0.9, 1.01, 0.01)
    assert growth.before.sum() == pytest.approx(before.mean()) and growth.after.sum() == pytest.approx(after.mean())


def test_runs_that_differ_from_the_first_step_on_are_apart_and_two_seeds_are_not():
    random = np.random.default_rng(0)
    steps = pd.RangeIndex(1, 301)

    def run(offset: float, slope: float = 0.0) -> Log:
        loss = 5 - 0.005 * np.arange(300) + offset + slope * np.arange(300) + 0.1 * random.normal(size=300)
        return log(pd.DataFrame({"loss": loss}, index=steps))

    (found,) = apart(run(1.0), run(0.0))
    assert found["first"] and found["tag"] == "loss"
    assert found["run"] - found["reference"] == pytest.approx(1.0, abs=0.1)
    (later,) = apart(run(0.0, slope=0.005), run(0.0))
    assert not later["first"] and 20 <= later["step"] <= 120
    assert [apart(run(0.0), run(0.0)) for _ in range(50)] == [[]] * 50
    assert apart(run(0.05), run(0.0)) == []  # smaller than a difference that counts


def test_the_last_common_step_lists_the_largest_factor_first():
    one = log(pd.DataFrame({"loss": [2.0, 11.0], "lr": [1.0, 1.1]}, index=[1, 2]))
    two = log(pd.DataFrame({"loss": [2.0, 2.2], "lr": [1.0, 1.0], "grad_norm": [1.0, 1.0]}, index=[1, 2]))
    table = at_the_end(one, two)
    assert table.to_numpy().tolist() == [["loss", 11.0, 2.2], ["lr", 1.1, 1.0]] and table.attrs["step"] == 2


@pytest.mark.slow
def test_two_seeds_of_the_healthy_arms_of_the_bench_are_rarely_apart():
    runs = {(t.run.arm, t.run.seed): t for t in labelled([*mmqk.load_runs("reports/bench/bench.zip")])}
    losses = {key: log(t.metrics[["loss"]]) for key, t in runs.items() if t.healthy or t.run.arm == "rate-start"}
    arms = {arm for arm, _ in losses} - {"rate-start"}
    pairs = [(arm, *two) for arm in sorted(arms) for two in itertools.combinations(range(1, 7), 2)]
    found = [bool(apart(losses[arm, one], losses[arm, two])) for arm, one, two in pairs]
    assert len(found) == 180 and sum(found) <= 9
    assert all(apart(losses["rate-start", seed], losses["healthy", seed % 6 + 1]) for seed in range(1, 7))  # control
