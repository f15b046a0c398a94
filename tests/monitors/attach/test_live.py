"""Losses by target modality and alarms of `attach` while a model trains."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from mmqk.monitors import attach
from mmqk.store import alarms_of, read_alarms, read_metrics
from tests.monitors.attach.nets import Net, V, batches
from tests.monitors.attach.test_exact import IMAGE, NAMES, modality_of


def by_hand(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> dict[str, float]:
    """Return the losses and log Z of targets that are not -100, by loops in float64."""
    sums: dict[str, list[float]] = {}
    modality = modality_of(targets_BT.clamp_min(0))
    for b, t in np.ndindex(*targets_BT.shape):
        target, z = int(targets_BT[b, t]), logits_BTV[b, t].detach().double().numpy()
        if target == -100:
            continue
        log_z = np.log(np.exp(z - z.max()).sum()) + z.max()
        for tag, x in (("loss", log_z - z[target]), ("log_z", log_z)):
            sums.setdefault(f"{tag}/{NAMES[modality[b, t]]}", []).append(x)
    means = {tag: sum(xs) / len(xs) for tag, xs in sums.items()}
    every = [x for name in NAMES for x in sums.get(f"loss/{name}", [])]
    return means | {"loss": sum(every) / len(every)}


def a_batch(seed: int, B: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    targets_BT = torch.randint(0, V, (B, 7), generator=random)
    targets_BT[0, :4] = -100
    return 3 * torch.randn(B, 7, V, generator=random), targets_BT


@pytest.mark.parametrize("way", ["logits", "losses"])
def test_losses_by_target_modality_are_exact_over_micro_batches(tmp_path, way):
    net, steps = Net(["sdpa"]), 3
    watch = attach(net, modality=IMAGE, every_n_steps=2, out=tmp_path)
    expected = {}
    for step in range(1, steps + 1):
        parts = [a_batch(10 * step + i, B=2 + i) for i in range(2)]
        for logits, targets in parts:
            net(targets.clamp_min(0))
            losses = nn.functional.cross_entropy(logits.mT, targets, reduction="none")
            watch.loss(logits if way == "logits" else losses, targets)
        expected[step] = by_hand(*(torch.cat(x) for x in zip(*parts, strict=True)))
        watch.step()
    watch.close()
    lines = {line["step"]: line for line in read_metrics(tmp_path / "metrics.jsonl")}
    assert sorted(lines) == [1, 2, 3]  # a line per step, also without a probe
    for step, values in expected.items():
        found = {tag: x for tag, x in lines[step].items() if tag in values}
        if way == "losses":
            values = {tag: x for tag, x in values.items() if not tag.startswith("log_z")}
            assert not any(tag.startswith("log_z") for tag in lines[step])
        assert found == pytest.approx(values, rel=1e-6) and len(values) == (5 if way == "logits" else 3)
    # Control: the mean of the micro-batches' means is another number.
    means = [by_hand(*part)["loss"] for part in parts]
    assert sum(means) / 2 != pytest.approx(expected[3]["loss"], rel=1e-6)


def _rank(number: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=number, world_size=2)
    watch = attach(Net(["sdpa"]), modality=IMAGE, every_n_steps=0, out=None)
    logits, targets = a_batch(number, B=2 + number)
    watch.loss(logits, targets)
    watch.losses.end_step(1, torch.tensor(float(number)), torch.device("cpu"))
    lines = watch.losses.lines()
    with open(f"{folder}/{number}.json", "w") as file:
        json.dump(lines[1], file)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_losses_are_exact_over_ranks(tmp_path):
    mp.spawn(_rank, (str(tmp_path),), nprocs=2)
    lines = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2)]
    expected = by_hand(*(torch.cat(x) for x in zip(*(a_batch(n, B=2 + n) for n in range(2)), strict=True)))
    assert lines[0] == lines[1] == pytest.approx(expected | {"loss": 0.5}, rel=1e-6)


def train(net, tmp_path, losses, **options):
    """Call the watch with these losses; return the alarms that it raised."""
    alarms = []
    watch = attach(net, modality=IMAGE, every_n_steps=50, out=tmp_path, on_alarm=alarms.append, **options)
    for loss, ids in zip(losses, batches(len(losses), B=1, T=12), strict=True):
        net(ids)
        watch.step(loss=torch.tensor(loss))
    watch.close()
    return alarms


def test_alarms_are_those_of_the_rules_and_each_kind_is_printed_once(tmp_path, capsys):
    noise = np.random.default_rng(0).normal(0, 0.02, 260)
    losses = 3.0 + noise
    losses[[150, 200]] += 2  # two spikes
    alarms = train(Net(["sdpa"]), tmp_path, losses.tolist(), max_steps=260)
    assert [(a.step, a.tag) for a in alarms if a.name == "spike"] == [(151, "loss"), (201, "loss")]
    assert alarms == alarms_of(read_metrics(tmp_path / "metrics.jsonl"), 0, 260) == read_alarms(tmp_path)
    printed = capsys.readouterr().out
    assert printed.count("mmqk: alarm at step 151: spike: ") == printed.count(": spike: ") == 1
    # Control: without the spikes there is no alarm.
    assert train(Net(["sdpa"]), tmp_path / "calm", (3.0 + noise).tolist(), max_steps=260) == []
    resumed = attach(net := Net(["sdpa"]), modality=IMAGE, out=tmp_path)
    resumed.steps = 160
    net(batches(1)[0])
    resumed.step()
    assert [a.step for a in read_alarms(tmp_path)] == [151]


def test_losses_wait_for_10_steps_at_most(tmp_path):
    net = Net(["sdpa"])
    watch = attach(net, modality=IMAGE, every_n_steps=500, out=tmp_path)
    for ids in batches(29, B=1, T=12):
        net(ids)
        watch.step(loss=1.0)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 21))


class Overflow(nn.Module):
    """Makes the values of some tokens infinite."""

    def __init__(self, where_BT: torch.Tensor):
        super().__init__()
        self.where_BT = where_BT

    def forward(self, x_BTD):
        return x_BTD.masked_fill(self.where_BT[..., None], math.inf)


@pytest.mark.parametrize("where", ["weight", "output", "gradient", "nowhere"])
def test_the_first_value_that_is_not_finite_is_named(tmp_path, capsys, where):
    net = Net(["sdpa"] * 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.0) if where != "output" else None
    alarms = []
    watch = attach(net, modality=IMAGE, every_n_steps=1, optimizer=optimizer, on_alarm=alarms.append)
    (ids,), of_images = batches(1, B=2, T=12), ""
    if where == "output":
        is_image_BT = torch.from_numpy(modality_of(ids) == 1)
        images, is_image_BT[0] = int(is_image_BT.sum()), False
        net.layers[1].mlp[1] = nn.Sequential(nn.GELU(), Overflow(is_image_BT))
        of_images = f"{int(is_image_BT.sum())} of {images} image tokens"
    for _ in range(2):
        out = net(ids)
        out.nan_to_num(0, 0, 0).square().mean().backward()
        if where == "gradient":
            net.layers[0].mlp[0].weight.grad[0, 0] = math.nan
            net.embed.weight.grad[0, 0] = math.inf  # later in the backward pass
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        if where == "weight":
            with torch.no_grad():
                net.layers[1].attention.k.weight[0, 0] = math.nan
        watch.step()
    named = [alarm.sentence for alarm in alarms if alarm.name == "non_finite"]
    first = {
        "weight": "the weight layers.1.attention.k.weight, which is NaN",
        "output": f"the output of layers.1.mlp.1.1, which is infinite in {of_images}",
        "gradient": "the gradient of layers.0.mlp.0.weight",
    }
    assert len(named) == (where != "nowhere")
    if where != "nowhere":
        assert named[0].endswith(f"; the first is {first[where]}")
    assert capsys.readouterr().out.count("alarm at step 1: non_finite: ") == len(named)


def _rank_with_an_infinite_output(number: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=number, world_size=2)
    torch.manual_seed(0)
    net = Net(["sdpa"] * 2)
    alarms: list = []
    watch = attach(net, modality=IMAGE, every_n_steps=1, on_alarm=alarms.append)
    (ids,) = batches(1, B=2, T=12)
    if number == 1:  # on the second rank alone
        net.layers[1].mlp[1] = nn.Sequential(nn.GELU(), Overflow(torch.ones(2, 12, dtype=torch.bool)))
    net(ids)
    watch.step()
    watch.close()
    with open(f"{folder}/{number}.json", "w") as file:
        json.dump([alarm.sentence for alarm in alarms if alarm.name == "non_finite"], file)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_the_first_rank_names_a_place_that_another_rank_has(tmp_path):
    mp.spawn(_rank_with_an_infinite_output, (str(tmp_path),), nprocs=2)
    first, second = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2))
    assert len(first) == 1 and "; the first is the output of layers.1.mlp.1.1, which is infinite" in first[0]
    assert second == []  # alarms are raised on the first rank alone
