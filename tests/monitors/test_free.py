"""Tests that a probe transfers numbers to the host only where it must, and causes no recompilation of the model.

`tests/training/test_no_sync.py` counts the transfers of a training step with monitors."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import lightning as L
import pytest
import torch
import torch._dynamo

from mmqk.config import MonitorConfig
from mmqk.model import EarlyFusionTransformer, ModelConfig, QKNormConfig
from mmqk.monitors import probe
from mmqk.monitors.own.callback import RunMonitor
from tests.one_step import token_batch
from tests.training.test_no_sync import Methods, Operations
from tests.training.toy import fit, module_of, toy_batch

BLOCKS = {"text": 9, "image": 7}
CONFIG = ModelConfig(vocab_sizes=BLOCKS, d_model=16, n_layers=3, n_heads=2)


def batch_of(T: int = 20, B: int = 2):
    ids_BT = torch.randint(sum(BLOCKS.values()), (B, T), generator=torch.Generator().manual_seed(0))
    return token_batch(ids_BT, BLOCKS)


@pytest.mark.parametrize("layers", [2, 6])
def test_a_probe_fetches_before_its_end_only_what_it_needs_once(layers):
    """The pairs of the batch are listed for all layers together, and all statistics are transferred in `flat`."""
    model = EarlyFusionTransformer(replace(CONFIG, n_layers=layers))
    asked: Counter[str] = Counter()

    def waits():
        names = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "tolist", "cpu", "numpy")
        return {name: asked[name] for name in names if asked[name]}

    with Operations(asked), Methods(asked):
        found = probe(model, batch_of(), heads=True)
    M = len(BLOCKS)
    # The pairs are listed twice, for all heads and for one head at a time. `nonzero` lists the pairs of each query
    # and key modality, and `tolist` reads their counts and `Pairs.reach`.
    assert waits() == {"nonzero": 2 * M**2, "tolist": 4}
    asked.clear()
    with Operations(asked), Methods(asked):
        assert found.flat()
    assert waits() == {"tolist": 1}


@pytest.fixture
def dynamo():
    """Yield the counters of torch._dynamo, reset to 0."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


def compiled_frames(counters) -> tuple[int, int, int]:
    """Return the numbers of compiled graphs, of graph breaks, and of compiled frames."""
    return (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), counters["frames"]["total"])


@pytest.mark.parametrize("kind", ["none", "rms"])
def test_a_compiled_model_stays_one_graph(dynamo, kind):
    config = replace(CONFIG, qk_norm=QKNormConfig(kind))
    module = module_of(config)
    module.model.compile(fullgraph=True, backend="eager")
    monitor = RunMonitor(MonitorConfig(every_n_steps=2, probe_sequences=2, parameters=True, precision=True))
    frames: list[tuple[int, int, int]] = []

    class AfterProbes(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            frames.append(compiled_frames(dynamo))

    fit(module, [toy_batch(seed) for seed in range(6)], callbacks=[monitor, AfterProbes()])
    assert frames[0][:2] == (1, 0)
    assert set(frames) == {frames[0]}  # no probe caused a recompilation
    # Control: a forward of another shape is counted.
    module.model(toy_batch(0, T=7).ids_BT)
    assert compiled_frames(dynamo) != frames[0]


def test_a_compiled_model_is_probed_like_an_eager_one(dynamo):
    model, batch = EarlyFusionTransformer(CONFIG), batch_of()
    eager = probe(model, batch).flat()
    model.compile(fullgraph=True, backend="eager")
    model(batch.ids_BT, batch.modality_BT, batch.document_BT)
    assert probe(model, batch).flat() == eager
    with pytest.raises(
        Exception, match=r"(?i)graph break|unsupported|observer|fullgraph"
    ):  # the error that a probe avoids
        model(batch.ids_BT, observer=lambda site, layer, x: print(float(x.sum())))
