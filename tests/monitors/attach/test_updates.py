"""Compares gradients, updates and clipping measured by `attach` with their definitions in float64."""

from __future__ import annotations

import json
import math
from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from mmqk.monitors import attach
from tests.monitors.attach.nets import Net, batches

LR, BETAS, EPS, DECAY, CLIP = 0.01, (0.8, 0.9), 1e-6, 0.1, 0.05


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = Net(["sdpa"] * 2).double()

    def forward(self, ids):
        return self.net(ids)


def train(model, optimizer, steps=4, clip=CLIP, watch=None, seen=None):
    """Train, with a call of ``seen`` between the clipping and the update; return the losses."""
    losses = []
    for (ids,) in ((b,) for b in batches(steps, B=2, T=9)):
        loss = nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        if clip:
            clip_grad_norm_(model.parameters(), clip)
        if seen is not None:
            seen(before)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if watch is not None:
            watch.step()
    return losses


def adam_by_hand(model, clip):
    """Return a function that follows AdamW in float64, and the statistics of its newest step."""
    m, v, values, t, factors = {}, {}, {}, [0], []
    weights = {n: p.detach().double().numpy().copy() for n, p in model.named_parameters()}

    def follow(gradients):
        t[0] += 1
        values.clear()
        square = {n: float((g.double().numpy() ** 2).sum()) for n, g in gradients.items()}
        total = math.sqrt(sum(square.values()))
        factor = min(1.0, clip / (total + 1e-6)) if clip else 1.0
        factors.append(factor)
        groups = {}
        for n, g in gradients.items():
            g = factor * g.double().numpy()
            m[n] = BETAS[0] * m.get(n, 0.0) + (1 - BETAS[0]) * g
            v[n] = BETAS[1] * v.get(n, 0.0) + (1 - BETAS[1]) * g**2
            m_hat, v_hat = m[n] / (1 - BETAS[0] ** t[0]), v[n] / (1 - BETAS[1] ** t[0])
            update = -LR * DECAY * weights[n] - LR * m_hat / (np.sqrt(v_hat) + EPS)
            weights[n] = weights[n] + update
            group = f"layer{int(n.split('.')[2]):02d}" if ".layers." in n else n.rpartition(".")[0]
            of_group = groups.setdefault(group, [0.0, 0.0])
            of_group[0] += square[n]
            of_group[1] += (update**2).sum()
            if g.ndim > 1:
                values[f"grad_norm/{n}"] = math.sqrt(square[n])
                values[f"update_norm/{n}"] = math.sqrt((update**2).sum())
                values[f"update_rms/{n}"] = math.sqrt((update**2).mean()) / LR
                values[f"grad_over_v/{n}"] = math.sqrt((g**2 / np.maximum(v_hat, EPS**2)).mean())
        for group, (grad_sq, update_sq) in groups.items():
            values[f"grad_norm/{group}"] = math.sqrt(grad_sq)
            values[f"update_norm/{group}"] = math.sqrt(update_sq)
            values[f"grad_share/{group}"] = grad_sq / total**2
        values["grad_norm"], values["update_norm"] = total, math.sqrt(sum(u for _, u in groups.values()))
        if clip:
            values["clip_factor"] = factor
            values["clip_share"] = sum(f < 1 for f in factors) / len(factors)

    return follow, values


def adamw(model):
    return torch.optim.AdamW(model.parameters(), LR, BETAS, EPS, DECAY)


@pytest.mark.parametrize("clip", [CLIP, 18.0, None])
def test_gradients_updates_and_clipping_equal_those_of_adamw_by_hand(clip):
    model, logged = Model(), {}
    optimizer = adamw(model)
    watch = attach(
        model, modality={}, every_n_steps=4, optimizer=optimizer, log=lambda values, step: logged.update(values)
    )
    follow, expected = adam_by_hand(model, clip)
    train(model, optimizer, clip=clip, watch=watch, seen=follow)
    of_steps = {tag: x for tag, x in logged.items() if tag.startswith(("grad_", "update_", "clip_"))}
    assert of_steps.keys() == expected.keys() and len(expected) > 60
    assert of_steps == pytest.approx(expected, rel=2e-5)
    assert clip != 18.0 or 0 < expected["clip_share"] < 1
    assert sum(x for tag, x in of_steps.items() if tag.startswith("grad_share/")) == pytest.approx(1)
    if clip == CLIP:
        assert expected["clip_share"] == 1 and "q_norm/text/layer00" in logged
        # Control: the statistics of unclipped gradients are others.
        other, unclipped = adam_by_hand(Model(), None)
        again = Model()
        train(again, adamw(again), clip=None, seen=other)
        assert of_steps["update_norm"] != pytest.approx(unclipped["update_norm"], rel=2e-5)


def test_training_is_the_same_bit_for_bit_with_and_without():
    model, original = Model(), nn.utils.clip_grad._clip_grads_with_norm_
    twin = deepcopy(model)
    optimizer, other = adamw(model), adamw(twin)
    watch = attach(model, modality={}, every_n_steps=2, optimizer=[optimizer])
    losses = train(model, optimizer, watch=watch)
    assert losses == train(twin, other)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    watch.close()
    assert nn.utils.clip_grad._clip_grads_with_norm_ is original
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def of_way(way, rows):
    """Train 4 steps with these rows of each batch, as one process or sharded; return the statistics of the last."""
    model, logged = Model(), {}
    called = DistributedDataParallel(model) if way == "ddp" else model
    if way == "fsdp":
        for part in (*model.net.layers, model):
            fully_shard(part)
    optimizer = adamw(model)
    watch = attach(called, modality={}, every_n_steps=4, optimizer=optimizer,
                   log=lambda values, step: logged.update(values))  # fmt: skip
    for ids in batches(4, B=4, T=9):
        logits = called(ids[rows])
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[rows, 1:].flatten()).backward()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        watch.step()
    watch.close()
    return {tag: x for tag, x in logged.items() if tag.startswith(("grad_", "update_", "clip_"))}


def rank(number, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=number, world_size=2)
    found = {way: of_way(way, slice(2 * number, 2 * number + 2)) for way in ("ddp", "fsdp")}
    if number == 0:
        (folder / "found.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="fully_shard of torch 2.6 needs a GPU")
def test_two_ranks_measure_what_one_process_does(tmp_path):
    mp.spawn(rank, (tmp_path,), nprocs=2)
    alone, half = of_way("one process", slice(None)), of_way("one process", slice(2))
    for way, found in json.loads((tmp_path / "found.json").read_text()).items():
        assert found == pytest.approx(alone, rel=1e-6), way
        # Control: the gradient of one rank's rows is another one.
        assert found["grad_norm"] != pytest.approx(half["grad_norm"], rel=1e-2)
    assert len(alone) > 60


def test_an_optimizer_without_a_second_moment_has_no_ratio_to_it():
    model, logged = Model(), {}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = attach(
        model, modality={}, every_n_steps=4, optimizer=optimizer, log=lambda values, step: logged.update(values)
    )
    train(model, optimizer, clip=None, watch=watch)
    assert logged["update_norm"] == pytest.approx(0.1 * logged["grad_norm"])
    assert not any(tag.startswith(("grad_over_v", "clip_")) for tag in logged)


def sparse(model):
    model.net.embed.sparse = True
    return torch.optim.SparseAdam([model.net.embed.weight], LR)


def of_timm(model, name):
    return pytest.importorskip("timm.optim").create_optimizer_v2(model.parameters(), opt=name, lr=LR)


OTHERS = {
    "lamb": lambda model: of_timm(model, "lamb"),
    "adan": lambda model: of_timm(model, "adan"),
    "adafactor": lambda model: pytest.importorskip("transformers.optimization").Adafactor(model.parameters()),
    "sparse": sparse,
}


@pytest.mark.parametrize("name", OTHERS)
def test_optimizers_with_another_state_are_measured_and_train_the_same_weights(name, capsys):
    model, logged, make = Model(), {}, OTHERS[name]
    twin = deepcopy(model)
    watch = attach(
        model, modality={}, every_n_steps=4, optimizer=make(model), log=lambda values, step: logged.update(values)
    )
    assert train(model, watch.updates.optimizers[0], clip=None, watch=watch) == train(twin, make(twin), clip=None)
    assert logged["update_norm"] > 0 < logged["grad_norm"] and "training goes on" not in capsys.readouterr().out
    assert any(tag.startswith("grad_over_v/") for tag in logged) == (name == "lamb")


def test_an_error_of_the_measurement_does_not_end_the_training(capsys):
    model, logged = Model(), {}
    optimizer = adamw(model)
    watch = attach(
        model, modality={}, every_n_steps=4, optimizer=optimizer, log=lambda values, step: logged.update(values)
    )
    watch.updates._measure = lambda optimizer: 1 / 0
    train(model, optimizer, clip=None, watch=watch)
    assert "no numbers of the update at step 1, training goes on" in capsys.readouterr().out
    assert "q_norm/text/layer00" in logged and "update_norm" not in logged


def test_a_gradient_scaler_does_not_scale_the_gradient_norm():
    """A fused optimizer divides by the scale in its step, others before it."""

    def norms_of(fused):
        model, logged = Model(), {}
        optimizer = torch.optim.AdamW(model.parameters(), LR, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        watch = attach(model, modality={}, every_n_steps=1, optimizer=optimizer, log=lambda v, step: logged.update(v))
        (ids,) = batches(1, B=2, T=9)
        loss = nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        watch.step()
        return {tag: x for tag, x in logged.items() if tag.startswith(("grad_", "update_"))}

    norms = norms_of(False)
    assert norms == pytest.approx(norms_of(True), rel=1e-5) and len(norms) > 30


def test_the_clipping_of_a_step_that_a_scaler_skips_is_forgotten():
    model, logged = Model(), {}
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=2.0)
    watch = attach(model, modality={}, every_n_steps=1, optimizer=optimizer, log=lambda v, step: logged.update(v))
    for ids, factor in zip(batches(2, B=2, T=9), (math.inf, 1.0), strict=True):
        loss = nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        scaler.scale(factor * loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        watch.step()
    assert math.isfinite(logged["grad_norm"]) and watch.updates.bad_gradient is None
