"""Tests `attach` while a model trains, eager and compiled: its files, and that it changes nothing."""

from __future__ import annotations

import pytest
import torch

from mmqk.lab.runs import read_runs
from mmqk.monitors import attach
from mmqk.monitors.formulas.reduce import over_layers
from mmqk.store import UserError, read_metrics
from tests.monitors.attach.nets import L, Net, batches, loss_of

IMAGE = {"image": range(10, 40)}


def train(called, model, steps=20, watch=None) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.manual_seed(3)
    for ids in batches(steps):
        loss_of(called(ids), ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        if watch is not None:
            watch.step()
    return {name: x.clone() for name, x in model.state_dict().items()}


@pytest.mark.parametrize("way", ["plain", "compiled", "compiled in place", "its module attached"])
def test_training_has_the_same_weights_with_and_without(way, tmp_path, capsys):
    """The model has dropout. With fullgraph, a graph break in the hook would be an error."""
    torch._dynamo.reset()
    runs, logged = [], []
    for watched in (False, True):
        model = called = Net("sdpa", dropout=0.2)
        if way in ("compiled", "its module attached"):
            called = torch.compile(model, backend="eager", fullgraph=True)
        elif way == "compiled in place":
            model.compile(backend="eager", fullgraph=True)
        watch = None
        if watched:
            given = model if way == "its module attached" else called
            watch = attach(given, modality=IMAGE, every_n_steps=20, out=tmp_path / "mine",
                           log=lambda values, step: logged.append((step, values)))  # fmt: skip
        runs.append(train(called, model, watch=watch))
        if watch is not None:
            watch.close()
    assert all(torch.equal(x, runs[1][name]) for name, x in runs[0].items())
    assert not any(torch.equal(x, Net("sdpa").state_dict()[name]) for name, x in runs[1].items() if "mlp" in name)
    lines = read_metrics(tmp_path / "mine" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [step for step, _ in logged] == [10, 20]
    last = {k: v for k, v in lines[-1].items() if k != "step"}
    assert last | over_layers(last) == logged[-1][1]
    assert {f"attn_entropy/image/layer{n:02d}" for n in range(L)} <= lines[0].keys()
    assert lines[0]["attn_layers_seen"] == L and lines[0]["attn_layers_hidden"] == 0
    assert lines[0]["probe_sequences"] == 4
    (summary,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mmqk")]
    assert f"attention measured in {L} of {L} layers" in summary and "tokens " in summary
    assert "% of a step" in summary and "first probe (includes warm-up)" in summary and "ms" in summary
    (run,) = read_runs(tmp_path)
    assert run.status.status == "completed" and run.status.step == 20


def test_autocast_that_a_model_enters_itself_is_off():
    """The model enters autocast in its forward, like a model that accelerate wraps."""
    net, (ids,) = Net(), batches(1)

    class Wrapped(Net):
        def forward(self, ids):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(ids)

    wrapped = Wrapped()
    wrapped.load_state_dict(net.state_dict())
    assert wrapped(ids).dtype == torch.bfloat16
    plain = attach(net, modality=IMAGE).probe(ids=ids).flat()
    assert attach(wrapped, modality=IMAGE).probe(ids=ids).flat() == plain
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attach(net, modality=IMAGE).probe(ids=ids).flat() == plain and torch.is_autocast_enabled("cpu")


def test_another_watch_does_not_get_the_calls_of_a_probe():
    net, (ids,), logged = Net(), batches(1), {}
    watches = [attach(net, every_n_steps=1, log=lambda values, step: logged.update(values)) for _ in range(2)]
    net(ids)
    for watch in watches:
        watch.step()
        assert logged["probe_sequences"] == 4


def test_a_failing_forward_is_told_and_everything_put_back(capsys):
    class Whole(Net):
        def forward(self, ids, size=6):
            if len(ids) != size:
                raise ValueError(f"all {size} or none")
            return super().forward(ids)

    model, (ids,) = Whole(), batches(1)
    watch = attach(model, modality=IMAGE)
    whole = attach(model, modality=IMAGE, sequences=6).probe(ids=ids).flat()
    hooks, fast = list(model._forward_pre_hooks), torch.backends.mha.get_fastpath_enabled()
    assert watch.probe(ids=ids).flat() == watch.probe(ids=ids).flat() == whole and whole["probe_sequences"] == 6
    said = "mmqk: the probe uses all 6 sequences of the batch, not 4: "
    assert capsys.readouterr().out.count(said) == 1
    with pytest.raises(RuntimeError, match=r"6 of 6 sequences\) failed \(ValueError: all 7 or none"):
        watch.probe(ids=ids, size=7)
    assert model.training and torch.is_grad_enabled() and not torch.overrides._get_current_function_mode_stack()
    assert not torch.nn.modules.module._global_forward_pre_hooks and list(model._forward_pre_hooks) == hooks
    assert torch.backends.mha.get_fastpath_enabled() == fast


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_folder_is_one_run(first, tmp_path):
    model, (ids,) = Net(["sdpa"]), batches(1)

    def run(numbers, start=0, every=1):
        watch = attach(model, modality=IMAGE, every_n_steps=every, out=tmp_path)
        watch.steps = start
        try:
            for number in numbers:
                model(ids)
                watch.step(number)
        finally:
            watch.close()

    run(range(first, first + 3))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for every in (1, 3):  # the first step refuses the folder; a probe every 3 steps has not run by then
        with pytest.raises(UserError, match=rf"has a run up to step {first + 2}: give another folder"):
            run(range(first, first + 1), every=every)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    run(range(first + 2, first + 5), start=first + 1)  # the control: a resumed run
    steps = [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == list(range(first, first + 5))


def test_three_modalities_and_several_ranges():
    model, (ids,) = Net(), batches(1)
    ranges = {"image": [range(10, 15), range(30, 35)], "audio": range(20, 25)}
    numbers = attach(model, modality=ranges).probe(ids=ids).flat()
    assert "attn_mass/audio-image/layer02" in numbers and "out_block_log_z/text-audio" in numbers
    swapped = {"image": range(20, 25), "audio": [range(10, 15), range(30, 35)]}
    other = attach(model, modality=swapped).probe(ids=ids).flat()
    assert other["q_norm/audio/layer00"] == numbers["q_norm/image/layer00"] != numbers["q_norm/audio/layer00"]
