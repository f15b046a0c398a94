"""Compares the spectral entropy of the change of W_q W_k^T with full products in numpy, known answers and a run."""

from __future__ import annotations

import math
from dataclasses import replace

import lightning as L
import numpy as np
import pytest
import torch

from mmqk.config import MonitorConfig
from mmqk.model import PerModalityConfig
from mmqk.monitors.formulas.weights import product_change_entropy
from mmqk.monitors.own.callback import RunMonitor
from tests.training.toy import MODEL, apart, fit, module_of, toy_batch, weights

MONITOR = MonitorConfig(every_n_steps=2, probe_sequences=2, matrices=True)


def expected(q, k, earlier_q, earlier_k, second_order=False) -> float:
    """Return the mean entropy over heads, from (D, D) products in fp64."""
    q, k, earlier_q, earlier_k = (x.double().numpy() for x in (q, k, earlier_q, earlier_k))
    entropies = []
    for h in range(len(q)):
        g = h * len(k) // len(q)
        change_q, change_k = (q[h] - earlier_q[h]).T, (k[g] - earlier_k[g]).T  # (D, K)
        product = change_q @ earlier_k[g] + earlier_q[h].T @ change_k.T
        product += second_order * (change_q @ change_k.T)
        p = np.linalg.svd(product, compute_uv=False) ** 2
        p = p[p > 1e-20 * p.sum()] / p.sum()
        entropies.append(-(p * np.log(p)).sum())
    return float(np.mean(entropies))


def random_matrices(H: int, G: int, K: int, D: int, change: float, seed: int = 0) -> list[torch.Tensor]:
    """Return W_q and W_k after a change, then W_q and W_k before it, with column scales from 0.1 to 3."""
    random = torch.Generator().manual_seed(seed)
    before = [torch.randn(n, K, D, generator=random) * torch.linspace(0.1, 3, D) for n in (H, G)]
    sizes = change * torch.linspace(2, 0.2, K)[:, None]
    changes = [sizes * torch.randn(n, K, D, generator=random) for n in (H, G)]
    return [w + d for w, d in zip(before, changes, strict=True)] + before


@pytest.mark.parametrize(("H", "G"), [(3, 3), (4, 2), (4, 1)])
@pytest.mark.parametrize(("K", "D"), [(3, 16), (4, 6), (8, 8)], ids=["thin", "rank above D", "square"])
@pytest.mark.parametrize("change", [1e-3, 1.0])
def test_it_equals_whole_products(H, G, K, D, change):
    matrices = random_matrices(H, G, K, D, change)
    found = float(product_change_entropy(*matrices).mean)
    assert found == pytest.approx(expected(*matrices), rel=1e-3)
    assert 0 < found < math.log(min(2 * K, D))
    if change == 1:  # controls: the change with its second-order term, and the reverse change
        assert found != pytest.approx(expected(*matrices, second_order=True), rel=1e-3)
        assert found != pytest.approx(expected(*matrices[2:], *matrices[:2]), rel=1e-3)
    if G == 2:  # control: another assignment of key heads
        q, k, earlier_q, earlier_k = matrices
        swapped = expected(q, k.flip(0), earlier_q, earlier_k.flip(0))
        assert found != pytest.approx(swapped, rel=1e-3)


def test_known_answers():
    K, D = 4, 32
    basis = torch.linalg.qr(torch.randn(D, 4 * K, generator=torch.Generator().manual_seed(1))).Q.T  # rows
    q, k, change_q, change_k = (1e-4 * x[None] if n > 1 else x[None] for n, x in enumerate(basis.split(K)))
    # The change of the product has 2 K equal singular values, or K if only W_q changes.
    assert float(product_change_entropy(q + change_q, k + change_k, q, k).mean) == pytest.approx(
        math.log(2 * K), rel=1e-4
    )
    assert float(product_change_entropy(q + change_q, k, q, k).mean) == pytest.approx(math.log(K), rel=1e-4)
    one = torch.zeros_like(q)
    one[0, 2] = change_q[0, 0]
    assert float(product_change_entropy(q + one, k, q, k).mean) == pytest.approx(0, abs=1e-4)
    # The size of the matrices does not matter: squares of these singular values are below the smallest fp32 number.
    tiny = [1e-15 * x for x in (q + change_q, k, q, k)]
    assert float(product_change_entropy(*tiny).mean) == pytest.approx(math.log(K), rel=1e-3)


def test_heads_without_a_change_are_left_out_and_what_is_not_finite_is_nan():
    q, k, earlier_q, earlier_k = random_matrices(3, 3, 3, 16, 0.1)
    whole = product_change_entropy(q, k, earlier_q, earlier_k)
    q[1], k[1] = earlier_q[1], earlier_k[1]
    some = product_change_entropy(q, k, earlier_q, earlier_k)
    assert (float(whole.count), float(some.count)) == (3, 2)
    others = expected(*(x[[0, 2]] for x in (q, k, earlier_q, earlier_k)))
    assert float(some.mean) == pytest.approx(others, rel=1e-3)
    assert float(product_change_entropy(earlier_q, earlier_k, earlier_q, earlier_k).count) == 0
    for bad in (torch.nan, torch.inf):
        q[0, 0, 0] = bad
        broken = product_change_entropy(q, k, earlier_q, earlier_k)
        assert math.isnan(float(broken.mean)) and float(broken.count) == 2


# In a run ---------------------------------------------------------------------------------------------------


@pytest.fixture
def logged(monkeypatch) -> dict[int, dict[str, float]]:
    """Return the entropies that RunMonitor logs, by step."""
    lines: dict[int, dict[str, float]] = {}

    def keep(trainer, values) -> None:
        found = {tag: value for tag, value in values.items() if tag.startswith("qk_change_entropy")}
        if found:
            lines[trainer.global_step] = found

    monkeypatch.setattr("mmqk.monitors.own.callback._log", keep)
    return lines


class Kept(L.Callback):
    """Stores the weights after every step."""

    def __init__(self) -> None:
        self.after: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.after[trainer.global_step] = weights(pl_module)


def test_a_run_logs_the_change_since_the_last_probe(logged):
    config = replace(MODEL, n_kv_heads=2)
    monitor, kept = RunMonitor(MONITOR), Kept()
    module = module_of(config)
    fit(module, [toy_batch(step) for step in range(5)], callbacks=[monitor, kept])
    assert list(logged) == [4, 5]  # the probe of step 2 is the first, so it measures no change
    assert logged[5].keys() == {"qk_change_entropy/layer00", "qk_change_entropy/layer01"}

    def between(early: int, late: int, layer: int) -> float:
        heads = [
            kept.after[step][f"blocks.{layer}.attention.{name}.weight"].unflatten(0, (-1, config.head_dim))
            for step in (late, early)
            for name in ("w_q", "w_k")
        ]
        return expected(*heads)

    for step, early in ((4, 2), (5, 4)):
        for layer in range(2):
            value = logged[step][f"qk_change_entropy/layer{layer:02d}"]
            assert value == pytest.approx(between(early, step, layer), rel=1e-3)
            assert value != pytest.approx(between(early - 1, step, layer), rel=1e-3)
    # The weights equal those of a run that does not measure matrices.
    plain, without = module_of(config), RunMonitor(replace(MONITOR, matrices=False))
    fit(plain, [toy_batch(step) for step in range(5)], callbacks=[without])
    assert apart(weights(module), weights(plain)) == 0


def test_a_resume_continues_from_the_last_probe(logged):
    monitor, module = RunMonitor(MONITOR), module_of()
    fit(module, [toy_batch(0), toy_batch(1)], callbacks=[monitor])
    assert not logged
    state = monitor.state_dict()
    fit(module, [toy_batch(2), toy_batch(3)], callbacks=[monitor])
    uninterrupted = dict(logged[2])
    logged.clear()
    module = module_of()
    fit(module, [toy_batch(0), toy_batch(1)])
    resumed = RunMonitor(MONITOR)
    resumed.load_state_dict(state)
    fit(module, [toy_batch(2), toy_batch(3)], callbacks=[resumed])
    assert logged[2] == uninterrupted
    assert RunMonitor(replace(MONITOR, matrices=False)).state_dict() == {}


def test_copies_have_their_own(logged):
    config = replace(MODEL, per_modality=PerModalityConfig(qk=True))
    fit(module_of(config), [toy_batch(step) for step in range(4)], callbacks=[RunMonitor(MONITOR)])
    assert logged[4].keys() == {
        f"qk_change_entropy/{name}/layer{layer:02d}" for name in ("text", "image") for layer in range(2)
    }
