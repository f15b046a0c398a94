"""Between two flushes a training step never waits for the device: it reads no value of a tensor, and no shape depends
on a value.

On a GPU each such read waits until all earlier work is done. A CPU does not wait, so these tests count the reads. One
mode intercepts every operation, including those of the backward pass. The other mode intercepts every method call of
a tensor, because `tolist` is not an operation.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace

import lightning as L
import pytest
import torch
from torch.nn.attention.flex_attention import AuxOutput
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmqk.config import LossConfig, MonitorConfig
from mmqk.monitors.own.callback import RunMonitor
from mmqk.training.callbacks import StepLog
from tests.training import toy
from tests.training.toy import MODEL, cut, fit, module_of, toy_batch

# Operations that return a value to the host, or whose output shape depends on the data.
OPERATIONS = {"_local_scalar_dense", "nonzero", "nonzero_numpy", "is_nonzero", "equal", "masked_select", "_unique2",
              "unique_dim", "unique_consecutive", "repeat_interleave"}  # fmt: skip
METHODS = {"tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__"}
# Functions that convert host values to a tensor; with a GPU, the host waits for the copy.
MAKERS = {"tensor", "as_tensor", "asarray", "from_numpy"}
STEPS, FLUSH = 6, 3


class Operations(TorchDispatchMode):
    def __init__(self, asked: Counter[str]) -> None:
        super().__init__()
        self.asked = asked

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        chosen = name in ("index", "index_put", "index_put_") and any(
            isinstance(t, torch.Tensor) and t.dtype in (torch.bool, torch.uint8) for t in tree_leaves(args[1])
        )
        known = name == "repeat_interleave" and (kwargs or {}).get("output_size") is not None
        if (name in OPERATIONS and not known) or chosen:
            self.asked[name] += 1
        return func(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    def __init__(self, asked: Counter[str]) -> None:
        super().__init__()
        self.asked = asked

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in METHODS | MAKERS:
            self.asked[name] += 1
        return func(*args, **(kwargs or {}))


class Questions(L.Callback):
    """Count the calls in each step that make the host wait for the device, from its first micro-batch on.

    A mode applies to one thread; on a CPU the backward pass runs in the same thread.
    """

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.by_step: list[Counter[str]] = []
        self._modes = ExitStack()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx == 0:
            self._modes.enter_context(Operations(self.asked))
            self._modes.enter_context(Methods(self.asked))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.by_step.append(Counter(self.asked))
            self.asked.clear()

    def on_train_end(self, trainer, pl_module) -> None:
        self._modes.close()

    def on_exception(self, trainer, pl_module, exception) -> None:
        self._modes.close()


def any_flex(q, k, v, **_):
    """Return outputs with the shapes of flex's kernel, which makes no one wait."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return q + k + v, AuxOutput(lse=q.sum(-1), max_scores=q.detach().amax(-1))


class Nothing(L.Callback):
    lines = ()


class Asks(L.Callback):
    """The control: a callback that reads the loss."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        outputs["loss"].item()


def questions(monkeypatch, module, accumulate=1, callbacks=(), documents=False) -> list[Counter[str]]:
    """Return the number of reads in each step of a run that flushes every third step."""
    monkeypatch.setattr(toy, "Records", Nothing)
    monkeypatch.setattr("mmqk.model.backends._compiled", lambda: any_flex)
    batches = [toy_batch(seed, padding=2, documents=documents) for seed in range(STEPS)]
    found = Questions()
    parts = [part for batch in batches for part in cut(batch, accumulate)]
    fit(module, parts, accumulate, 0.5, [StepLog((FLUSH,)), *callbacks, found])
    return found.by_step


RUNS = {
    "plain": ({}, {}, {}, "sdpa"),
    "QK-Clip, grouped keys": ({"n_kv_heads": 2}, {}, {"qk_clip": 0.1}, "sdpa"),
    "split moments": ({}, {}, {"split_second_moment": True}, "sdpa"),
    "loss in chunks": ({"final_softcap": 3.0}, {"chunk_size": 7, "z_loss": 0.01}, {}, "sdpa"),
    "loss in chunks, split moments": ({}, {"chunk_size": 7}, {"split_second_moment": True}, "sdpa"),
    "dropout, sigma, modalities apart": (
        {"residual_dropout": 0.1, "attn_dropout": 0.1, "weight_reparam": "sigma", "embed_scale": {"image": 0.5}},
        {"weights": {"image": 0.0}}, {}, "sdpa"),
    "windows": ({"window": 3, "global_every": 2}, {}, {}, "math"),
    "rows, QK-Clip": ({"n_kv_heads": 2, "attn_softcap": 2.0}, {}, {"qk_clip": 0.1}, "flex"),
}  # fmt: skip


@pytest.mark.parametrize(("model", "loss", "optim", "backend"), RUNS.values(), ids=RUNS)
def test_only_a_flush_asks_the_device_and_once(monkeypatch, model, loss, optim, backend):
    accumulate = 1 if backend == "math" else 2
    module = module_of(replace(MODEL, **model), LossConfig(**loss), backend=backend, **optim)
    documents = backend != "sdpa" or "QK-Clip" in str(optim)
    asked = questions(monkeypatch, module, accumulate, documents=documents)
    assert asked == [{}, {}, {"tolist": 1}] * (STEPS // FLUSH)


@pytest.mark.parametrize("of", [{"parameters": True}, {"second_moment": True}, {"budget_every_n_steps": 50}], ids=str)
def test_between_two_probes_a_monitor_asks_nothing(monkeypatch, of):
    config = MonitorConfig(every_n_steps=FLUSH, probe_sequences=2, **of)
    asked = questions(monkeypatch, module_of(), callbacks=[RunMonitor(config)])
    assert not any(asked[i].keys() - MAKERS for i in (0, 1, 3, 4))
    assert asked[2]["nonzero"] > 0  # the control: a probe asks


def test_whoever_asks_is_seen(monkeypatch):
    asked = questions(monkeypatch, module_of(), callbacks=[Asks()])
    assert all(step["_local_scalar_dense"] == step["item"] == 1 for step in asked)
    every: Counter[str] = Counter()
    x = torch.arange(4.0, requires_grad=True)
    with Operations(every), Methods(every):
        x[x > 1].sum()
        x.detach().nonzero()
        torch.unique(x.detach())
        bool((x > 1).all())
        torch.equal(x, x)
        torch.tensor(1.0)
        x.repeat_interleave(torch.tensor([1, 2, 1, 1]))
    for name in ("index", "nonzero", "_unique2", "__bool__", "equal", "tensor", "repeat_interleave"):
        assert every[name], name

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, up):
            return up * up.sum().item()

    every.clear()
    with Operations(every):
        Backward.apply(x).sum().backward()
    assert every["_local_scalar_dense"] == 1
