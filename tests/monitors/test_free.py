"""Tests that monitors cause no transfer to the host outside a flush, and no recompilation of the model."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace

import lightning as L
import pytest
import torch
import torch._dynamo
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from mmqk.config import MonitorConfig
from mmqk.model import EarlyFusionTransformer, ModelConfig, QKNormConfig
from mmqk.monitors import probe
from mmqk.monitors.own.callback import RunMonitor, StepMonitor
from mmqk.training.loop import StepLog
from tests.one_step import build, step, token_batch
from tests.training.toy import fit, module_of, toy_batch

BLOCKS = {"text": 9, "image": 7}
CONFIG = ModelConfig(vocab_sizes=BLOCKS, d_model=16, n_layers=3, n_heads=2)
# Operations and tensor methods that need a number on the host or a shape that depends on the data. Methods are
# counted too, because a method can read a CPU tensor without an operation.
OPERATIONS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2")
METHODS = ("tolist", "cpu", "numpy")


class _Operations(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in OPERATIONS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in METHODS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class Transfers:
    """A context that counts the operations in which the host waits for the device."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._modes = ExitStack()

    def __enter__(self) -> Transfers:
        self._modes.enter_context(_Methods(self.counts))
        self._modes.enter_context(_Operations(self.counts))
        return self

    def __exit__(self, *_) -> None:
        self._modes.close()


def batch_of(T: int = 20, B: int = 2):
    ids_BT = torch.randint(sum(BLOCKS.values()), (B, T), generator=torch.Generator().manual_seed(0))
    return token_batch(ids_BT, BLOCKS)


def transfers_of_step(settings: dict, monitor: MonitorConfig | None = None) -> Counter[str]:
    """Return the number of transfers in one training step (forward, backward, clipping, update) with monitors."""
    module, batch = build(settings, CONFIG), batch_of()
    step(module, batch)  # creates the optimizer state
    optimizer = module.trainer.optimizers[0]
    if monitor is not None:
        module.step_watch = StepMonitor(module.model, monitor, 100, [0, 1])
        module.step_watch.before_step(1)
    optimizer.zero_grad()
    with Transfers() as transfers:
        module.backward(module.training_step(batch, 0))
        module.configure_gradient_clipping(optimizer, 1.0)
        optimizer.step()
    return transfers.counts


class Counting(L.Callback):
    """Counts the transfers of each step, from the start of its batch to the start of the next batch."""

    def __init__(self) -> None:
        self.by_step: dict[int, int] = {}
        self._open: Transfers | None = None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx: int) -> None:
        if self._open is not None:
            self.by_step[trainer.global_step] = sum(self._open.counts.values())
            self._open.__exit__(None, None, None)
        self._open = Transfers()
        self._open.__enter__()

    def on_train_end(self, trainer, pl_module) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)


# No host synchronization -----------------------------------------------------------------------------------

# The transfers of a step without monitors: on a CPU torch's AdamW reads its step counts. On a GPU it is fused or
# capturable and reads none.
STEP_ITSELF = transfers_of_step({})


@pytest.mark.parametrize(
    ("settings", "monitor"),
    [
        ({"optim.qk_clip": 0.1}, None),
        ({}, MonitorConfig(every_n_steps=1, parameters=True)),
        ({}, MonitorConfig(every_n_steps=1, second_moment=True)),
        ({}, MonitorConfig(every_n_steps=0, budget_every_n_steps=50)),
    ],
    ids=["QK-Clip", "sizes by parameter", "second moment", "radial budget"],
)
def test_what_watches_a_step_fetches_nothing(settings, monitor):
    assert transfers_of_step(settings, monitor) == STEP_ITSELF
    # Control: each way to transfer a number is counted.
    with Transfers() as transfers:
        assert len(torch.ones(3).tolist()) == 3 * int(torch.ones(()))
        torch.ones(3).sum().item()
    assert transfers.counts == {"tolist": 1, "_local_scalar_dense": 2}


def transfers_of_run(callbacks: list[L.Callback], steps: int = 9) -> dict[int, int]:
    """Return the number of transfers of the Trainer and all callbacks, by step."""
    counting = Counting()
    module = module_of(CONFIG)
    trainer = L.Trainer(
        max_steps=steps, max_epochs=-1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[counting, *callbacks],
    )  # fmt: skip
    batches = [toy_batch(seed, only=None) for seed in range(steps)]
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return counting.by_step


@pytest.mark.filterwarnings("ignore")
def test_between_two_probes_a_run_fetches_nothing_more():
    plain = transfers_of_run([])
    monitor = RunMonitor(MonitorConfig(every_n_steps=4, probe_sequences=2, parameters=True))
    watched = transfers_of_run([StepLog([4]), monitor])
    assert plain.keys() == watched.keys() == set(range(1, 9))
    more = {step: watched[step] - plain[step] for step in plain}
    assert {step: n for step, n in more.items() if step % 4} == dict.fromkeys((1, 2, 3, 5, 6, 7), 0)
    # Controls: a flush and a probe transfer numbers, and logging in every step transfers numbers in every step.
    assert more[4] > 0 and more[8] > 0
    every = transfers_of_run([StepLog([1])])
    assert all(every[step] > plain[step] for step in plain)


@pytest.mark.parametrize("layers", [2, 6])
def test_a_probe_fetches_before_its_end_only_what_it_needs_once(layers):
    """The pairs of the batch are listed for all layers together, and all statistics are transferred in `flat`."""
    model = EarlyFusionTransformer(replace(CONFIG, n_layers=layers))
    with Transfers() as transfers:
        found = probe(model, batch_of(), heads=True)
    M = len(BLOCKS)
    # The pairs are listed twice, for all heads and for one head at a time. `nonzero` lists the pairs of each query
    # and key modality, and `tolist` reads their counts and `Pairs.reach`.
    assert transfers.counts == {"nonzero": 2 * M**2, "tolist": 4}
    with Transfers() as transfers:
        assert found.flat()
    assert transfers.counts == {"tolist": 1}


# No graph break --------------------------------------------------------------------------------------------


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
