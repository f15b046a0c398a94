"""Compiled and recomputed blocks equal the eager model bit for bit, because the compile backends of these tests run
torch's eager kernels."""

import copy
import functools

import pytest
import torch
from torch import _dynamo as dynamo
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config

from mmqk.model.transformer import compile_blocks
from tests.model.small import VARIANTS, V, build, ids_of

NAMES = ("gemma", "chameleon", "untied, everything else", "deep norm")  # of VARIANTS
DROPPED = {"residual_dropout": 0.3, "attn_dropout": 0.2}
IDS_BT = ids_of(2, 12)
DOCUMENT_BT = torch.tensor([[0] * 5 + [1] * 7, [3] * 9 + [-1] * 3])


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    """Remove the graphs of other tests, and let `compile_blocks` capture graphs without compiling them."""
    captured_by(monkeypatch, "eager")
    limit, donated = dynamo.config.recompile_limit, functorch_config.donated_buffer
    dynamo.reset()
    counters.clear()
    with dynamo.config.patch(recompile_limit=limit), functorch_config.patch(donated_buffer=donated):
        yield
    dynamo.reset()


def captured_by(monkeypatch, backend, real=torch.compile):
    """Use this backend in torch.compile. aot_eager builds the forward and backward graphs and runs them uncompiled;
    inductor would take half a minute."""
    monkeypatch.setattr(torch, "compile", functools.partial(real, backend=backend))


def n_graphs():
    return counters["stats"]["unique_graphs"]


def compiled(model):
    model = copy.deepcopy(model)
    compile_blocks(model)
    return model


def step(model, ids_BT=IDS_BT, document_BT=None, seed=0):
    """Return the logits, and the gradient of every parameter."""
    torch.manual_seed(seed)
    out = model(ids_BT, document_BT=document_BT)
    weight = torch.linspace(-1, 1, V)
    return [out.detach(), *torch.autograd.grad((out * weight).square().sum(), list(model.parameters()))]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_compiled_equals_eager_to_the_bit(name, monkeypatch):
    captured_by(monkeypatch, "aot_eager")
    plain = build(**VARIANTS[name])
    model = compiled(plain)
    assert same(step(model, document_BT=DOCUMENT_BT), step(plain, document_BT=DOCUMENT_BT))
    # One graph for all blocks and one for the final norm. With DeepNorm the final norm does nothing, and torch 2.11
    # makes no graph for it.
    assert n_graphs() == 2 or (name == "deep norm" and n_graphs() == 1)
    assert not counters["graph_break"]
    with torch.no_grad():
        for parameter in plain.blocks[1].attention.w_q.parameters():
            parameter.mul_(-1.5)
    assert not same(step(model, document_BT=DOCUMENT_BT)[:1], step(plain, document_BT=DOCUMENT_BT)[:1])


def graphs_of(backend="math", **fields):
    dynamo.reset()
    counters.clear()
    model = compiled(build(backend=backend, **fields))
    step(model)
    step(model)
    return n_graphs()


def test_the_number_of_graphs_does_not_grow_with_layers():
    assert graphs_of("sdpa", n_layers=3) == graphs_of("sdpa", n_layers=6) == 2
    windows = {"window": 4, "global_every": 2}  # sdpa has no mask in layers without a window
    assert graphs_of("sdpa", n_layers=3, **windows) == graphs_of("sdpa", n_layers=6, **windows) == 3


def counted(model):
    """Return a list that grows by one entry each time a block of `model` runs."""
    calls = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, args: calls.append(block))
    return calls


@pytest.mark.parametrize(
    ("dropped", "and_compiled"),
    [({}, False), ({"residual_dropout": 0.3}, False), ({"attn_dropout": 0.2}, False), (DROPPED, True)],
)
def test_recomputed_blocks_give_the_same_step_to_the_bit(dropped, and_compiled, monkeypatch):
    captured_by(monkeypatch, "aot_eager")
    model = build(n_layers=2, **dropped).train()
    expected = step(model)
    if and_compiled:
        compile_blocks(model)
    calls = counted(model)
    model.activation_checkpointing = True
    assert same(step(model), expected)
    assert same(step(model, seed=1), expected) is not bool(dropped)  # the control: other masks give other gradients
    assert len(calls) == 2 * 2 * 2
    with torch.no_grad():
        model(IDS_BT)
    assert len(calls) == 2 * 2 * 2 + 2
    model.activation_checkpointing = False
    assert same(step(model), expected)
    assert len(calls) == 2 * 2 * 2 + 2 + 2
