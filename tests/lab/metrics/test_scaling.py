"""Compare the model size with torch's count, and test the extrapolation of planted curves."""

import math

import numpy as np
import pytest

from mmqk.lab.metrics import find_metric
from mmqk.lab.metrics.families import fit_quadratic, model_size
from mmqk.model import EarlyFusionTransformer, ModelConfig
from tests.lab.small_runs import config, small_run

BLOCKS = {"text": 20, "image": 12}


def sized(path, model, rate=0.01, logit=10.0, step=20, status="completed", **more):
    probes = {0: 1.0, step: logit, 100: 3 * logit}
    series = {"attn_logit_absmax/text-text/layer00": probes, "attn_logit_absmax/text-text/layer01": {step: 1e6}}
    series["loss/text"] = [3.0] * 100
    cfg = config(100, 0, rate, model=model, **more)
    return small_run(path, series, status=status, config=cfg)


@pytest.mark.parametrize(
    "model",
    [
        {"d_model": 32, "n_layers": 3, "n_heads": 4},
        {"d_model": 24, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_head": 8, "mlp": "gelu"},
        {"d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 40, "mlp": "geglu", "tie_embeddings": True},
    ],
)
def test_model_size_is_that_of_the_matrices_of_the_blocks(tmp_path, model):
    torch_model = EarlyFusionTransformer(ModelConfig(vocab_sizes=BLOCKS, **model))
    matrices = sum(p.numel() for p in torch_model.blocks.parameters() if p.ndim == 2)
    assert model_size(sized(tmp_path / "x", model | {"vocab_sizes": BLOCKS})) == matrices
    # The control: torch's count of all parameters includes embeddings.
    assert sum(p.numel() for p in torch_model.parameters()) > matrices + 32 * model["d_model"] - 1


def test_wortsmans_smallest_model_has_its_size(tmp_path):
    model = {"d_model": 256, "n_layers": 3, "n_heads": 4, "mlp": "gelu"}
    assert model_size(sized(tmp_path / "x", model)) == 12 * 3 * 256**2 == pytest.approx(2.4e6, rel=0.02)
    assert math.isnan(model_size(sized(tmp_path / "y", {"d_model": 256})))


SIZES = [{"d_model": d, "n_layers": 2, "n_heads": 4, "mlp": "gelu"} for d in (16, 32, 64, 128, 256)]


def curve(model, a=2.0, b=0.3, c=0.05):
    x = math.log(24 * model["d_model"] ** 2)
    return math.exp(a + b * (x - 9) + c * (x - 9) ** 2)


def test_a_quadratic_is_continued_exactly(tmp_path):
    runs = [sized(tmp_path / str(i), model, logit=curve(model)) for i, model in enumerate(SIZES)]
    metric, modality = find_metric("logit_extrapolation/text")
    assert metric.measure(runs, modality) == pytest.approx(1)
    # The control: the largest model is off the curve by a factor of 5. It is not part of the fit, so the ratio is
    # 0.2.
    runs[-1] = sized(tmp_path / "off", SIZES[-1], logit=5 * curve(SIZES[-1]))
    assert metric.measure(runs, modality) == pytest.approx(1 / 5)
    # A fit to smaller models on a straight line predicts too small a logit, because it lacks the quadratic term.
    straight = [sized(tmp_path / f"line{i}", m, logit=curve(m, c=0)) for i, m in enumerate(SIZES[:4])]
    assert metric.measure([*straight, runs[-1]], modality) < 1 / 5


def test_every_learning_rate_has_its_own_curve_and_the_worst_counts(tmp_path):
    runs = []
    for rate, a, off in ((0.01, 2.0, 1.1), (0.1, 8.0, 0.25)):
        for i, model in enumerate(SIZES):
            last = model is SIZES[-1]
            logit = curve(model, a) * (off if last else 1)
            status = "diverged" if last and rate == 0.1 else "completed"
            runs.append(sized(tmp_path / f"{rate}-{i}", model, rate, logit, status=status))
    measure = find_metric("logit_extrapolation")[0].measure
    assert measure(runs) == pytest.approx(4) and measure(runs[: len(SIZES)]) == pytest.approx(1 / 1.1)


def test_what_cannot_be_extrapolated_is_named(tmp_path):
    metric = find_metric("logit_extrapolation")[0]
    runs = [sized(tmp_path / str(i), model, logit=curve(model)) for i, model in enumerate(SIZES)]

    def why(runs):
        found = metric.measured(runs)
        assert math.isnan(found.value)
        return found.why

    assert "the model sizes are too few (3): the fit needs 3, and the prediction one more" in why(runs[:3])
    assert "two runs have" in why([*runs, sized(tmp_path / "twice", SIZES[0])])
    assert "a smaller model is not finite" in why([sized(tmp_path / "n", SIZES[0], logit=math.nan), *runs[1:]])
    assert "largest model's logit is not finite" in why([*runs[:4], sized(tmp_path / "i", SIZES[4], logit=math.inf)])


def test_quadratic_is_least_squares_in_logs():
    sizes, values = [1e5, 4e5, 2e6, 9e6], [3.0, 8.0, 50.0, 90.0]
    x, y = np.log(sizes), np.log(values)
    powers = np.stack([x**2, x, np.ones(4)], axis=1)
    brute = np.linalg.solve(powers.T @ powers, powers.T @ y)
    at = np.array([5e4, 1e6, 5e7])
    expected = np.exp(np.polyval(brute, np.log(at)))
    assert fit_quadratic(sizes, values)(at) == pytest.approx(expected, rel=1e-6)
    # Three points determine a quadratic. The fourth point is not on it.
    through = fit_quadratic(sizes[:3], values[:3])(np.array(sizes))
    assert through[:3] == pytest.approx(values[:3]) and through[3] != pytest.approx(values[3], rel=0.1)
