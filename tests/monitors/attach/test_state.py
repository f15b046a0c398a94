"""Tests that a probe changes no state of a model or of its inputs, and that it probes the batch that the step saw."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mmqk.monitors import attach
from tests.monitors.attach.nets import D, Net, batches, loss_of
from tests.monitors.attach.test_batch import llama

IMAGE = {"image": range(10, 40)}


class Meter:
    def __init__(self) -> None:
        self.inner = SimpleNamespace(values=[0])


# Kind of state -> a function that makes it, and one that changes it in a forward and returns a number.
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "counter": (lambda: 0, lambda net: setattr(net, "state", net.state + 1) or net.state),
    "new attribute": (lambda: 0, lambda net: setattr(net, "calls", getattr(net, "calls", 0) + 1) or net.calls),
    "dictionary": (lambda: {"a": {"n": 0}}, lambda net: net.state["a"].update(n=net.state["a"]["n"] + 1)
                   or net.state["a"]["n"]),
    "set": (set, lambda net: net.state.add(len(net.state)) or len(net.state)),
    "list in objects": (Meter, lambda net: net.state.inner.values.append(1) or len(net.state.inner.values)),
    "tensor": (lambda: torch.zeros(1), lambda net: float(net.state.add_(1))),
    "array": (lambda: np.zeros(2), lambda net: net.state.__iadd__(1)[0]),
    "generators": (lambda: [torch.Generator().manual_seed(0)],
                   lambda net: float(torch.rand((), generator=net.state[0]))),
    "generator of Python": (lambda: random.Random(0), lambda net: net.state.random()),
    "generator of NumPy": (lambda: np.random.default_rng(0), lambda net: net.state.random()),
    "old generator of NumPy": (lambda: np.random.RandomState(0), lambda net: net.state.rand()),
    "generators of all modules": (lambda: 0, lambda net: float(torch.rand(())) + random.random() + np.random.rand()),
}  # fmt: skip


class Stateful(Net):
    """Scales its output by a number that its state gives."""

    def __init__(self, kind: str):
        super().__init__(["sdpa"])
        make, self.change = KINDS[kind]
        self.state = make()

    def forward(self, ids):
        return super().forward(ids) * (1 + 0.1 * self.change(self))


class Remembering(Net):
    """Keeps the mean embedding of each batch in a buffer that grows, and counts the batches in another one. One part
    stays in evaluation mode."""

    def __init__(self):
        super().__init__(["sdpa"])
        self.register_buffer("past", torch.zeros(1, D))
        self.register_buffer("calls", torch.zeros(()))
        self.frozen = nn.Dropout().eval()

    def forward(self, ids):
        self.past = torch.cat([self.past, self.embed(ids).detach().mean((0, 1))[None]])
        self.calls += 1
        return self.frozen(super().forward(ids)) * (1 + self.past.sum() + self.calls)


def losses_of(model: nn.Module, between: Callable[[nn.Module], Callable[[], object]]) -> list[float]:
    """Train for 3 steps, call what ``between`` returned after each of them, and return the losses."""
    optimizer, losses, then = torch.optim.AdamW(model.parameters(), 1e-2), [], between(model)
    for ids in batches(3):
        losses.append(loss_of(model(ids), ids))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        then()
    return [float(loss.detach()) for loss in losses]


def nothing(model: nn.Module) -> Callable[[], object]:
    return lambda: None


def watched(model: nn.Module) -> Callable[[], object]:
    return attach(model, modality=IMAGE, every_n_steps=1).step


def another_forward(model: nn.Module) -> Callable[[], object]:
    return torch.no_grad()(lambda: model(batches(1)[0]))


@pytest.mark.parametrize("kind", [*KINDS, "buffer"])
def test_losses_are_the_same_with_and_without_probes_of_a_model_with_state(kind, capsys):
    def build() -> nn.Module:
        return Remembering() if kind == "buffer" else Stateful(kind)

    def losses(between: Callable[[nn.Module], Callable[[], object]]) -> list[float]:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        return losses_of(build(), between)

    plain = losses(nothing)
    assert losses(watched) == plain
    name = {"buffer": None, "generators of all modules": None, "new attribute": "calls"}.get(kind, "state")
    note = f" · changed by the forward and restored after the probe: {name} · "
    assert (note in capsys.readouterr().out) == (name is not None)
    assert losses(another_forward) != plain  # the control: another forward changes the state


def test_state_that_a_forward_leaves_alone_is_not_named():
    net = Net(["sdpa"])
    net.state = [make() for make, _ in KINDS.values()]
    watch = attach(net, modality=IMAGE)
    watch.probe(ids=batches(1)[0])
    assert watch.prober.changed == set()


class Cache:
    """A cache that a user wrote."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Tensor]] = []

    def get_seq_length(self) -> int:
        return len(self.entries)


class Cached(Net):
    """Adds the mean of all earlier segments, which a cache holds, to its output."""

    def forward(self, input_ids, memory):
        memory.entries.append({"mean": self.embed(input_ids).mean((0, 1)).mean().detach()})
        return super().forward(input_ids) * (1 + torch.stack([entry["mean"] for entry in memory.entries]).sum())


@pytest.mark.parametrize("name", ["memory", "cache", "past_key_values"])
def test_a_cache_among_the_inputs_is_left_alone(name, capsys):
    transformers = pytest.importorskip("transformers")
    (text,), logged = batches(1, T=24), []

    def run(is_watched: bool) -> tuple[list[float], int]:
        model = Cached(["sdpa"]) if name == "memory" else llama()
        cache = Cache() if name == "memory" else transformers.DynamicCache(config=model.config)
        watch = attach(model, modality=IMAGE, every_n_steps=is_watched, log=lambda values, step: logged.append(values))
        optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
        for ids in text.split(8, 1):  # segments of one document
            out = model(input_ids=ids, **{name: cache})
            loss = loss_of(out if name == "memory" else out.logits, ids)
            losses.append(float(loss.detach()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for layer in getattr(cache, "layers", []):
                layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
            watch.step()
            if is_watched and len(losses) == 1:  # the cache of the first segment was empty
                empty = {} if name != "memory" else {"memory": Cache()}
                alone = attach(model, modality=IMAGE).probe(input_ids=ids, **empty).flat()
                assert {tag: logged[0][tag] for tag in alone} == alone and "attn_entropy/image/layer00" in alone
        return losses, cache.get_seq_length()

    plain = run(False)
    assert run(True) == plain and plain[1] == (3 if name == "memory" else 24)
    assert "restored after the probe" not in capsys.readouterr().out  # the probe gets a copy of the cache
    steady = [len(values) for values in logged]
    assert len(steady) == 3 and (steady[0] == steady[2]) == (name == "memory")  # 8 queries do not see 24 keys


class Editing(nn.Module):
    """Edits its input before the first layer: placeholders are negative ids, one for each image token."""

    def __init__(self, way: str):
        super().__init__()
        self.net, self.way = Net(["sdpa"]), way

    def forward(self, batch):
        ids = batch if isinstance(batch, Tensor) else batch["ids"]
        is_image = ids < 0
        if self.way == "replaced":
            batch["ids"] = ids.clamp_min(0)
        elif self.way != "the loop edits":
            ids.clamp_min_(0)
        x = self.net.embed(ids.clamp_min(0)) + 3 * is_image[..., None]
        for layer in self.net.layers:
            x = layer(x)
        return self.net.head(x)


def ids_of_step() -> Tensor:
    (ids,) = batches(1)
    ids[:, 3:9] = -1
    return ids


def is_image(inputs) -> Tensor:
    batch = inputs["batch"]
    return ((batch if isinstance(batch, Tensor) else batch["ids"]) < 0).long()


@pytest.mark.parametrize("way", ["in place", "in a dictionary", "replaced", "the loop edits"])
def test_the_batch_that_the_step_saw_is_probed(way):
    def batch() -> Any:
        return {"ids": ids_of_step()} if way in ("in a dictionary", "replaced") else ids_of_step()

    model, logged = Editing(way), []
    watch = attach(model, modality=is_image, every_n_steps=2, log=lambda values, step: logged.append((step, values)))
    for _ in range(4):
        given = batch()
        model(given).sum().backward()
        if way == "the loop edits":  # a loader that writes the next batch into the same memory
            given.zero_()
        watch.step()
    assert [step for step, _ in logged] == [2, 4]
    expected = attach(model, modality=is_image).probe(batch=batch()).flat()
    assert "attn_mass/text-image/layer00" in expected
    for _, values in logged:
        assert {tag: values[tag] for tag in expected} == expected
    # `probe` does not edit its inputs either. Control: the edited batch has no image tokens.
    fresh = batch()
    attach(model, modality=is_image).probe(batch=fresh)
    assert torch.equal(fresh if isinstance(fresh, Tensor) else fresh["ids"], ids_of_step())
    edited = attach(model, modality=is_image).probe(batch=given).flat()
    assert "attn_mass/text-image/layer00" not in edited
