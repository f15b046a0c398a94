"""Two processes, each with half of the sequences, measure the same values as one process with all sequences."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F

from mmqk.data.batch import TokenBatch
from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.monitors.own.gradients import gradient_agreement
from mmqk.monitors.own.updates import BudgetWindow
from tests.training.ranks import free_port

SEQUENCES = 6  # three for each process: an odd number


def make_model() -> EarlyFusionTransformer:
    config = ModelConfig(vocab_sizes={"text": 9, "image": 7}, d_model=16, n_layers=2, n_heads=2)
    # In fp64, because the first Adam step turns gradients that are only rounding errors into full-size steps.
    return EarlyFusionTransformer(config, backend="math").double()


def rows(which: list[int]) -> TokenBatch:
    ids_BT = torch.randint(0, 16, (SEQUENCES, 30), generator=torch.Generator().manual_seed(0))
    ids_BT[:3] %= 9  # the first rank has no image token
    ids_BT = ids_BT[which]
    seen_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    mask_BT = seen_BT.clone()
    mask_BT[:, -1] = False
    return TokenBatch(ids_BT, (ids_BT >= 9).long(), mask_BT, seen_BT, torch.tensor(29.0 * SEQUENCES))


def parts(model, batch) -> torch.Tensor:
    ce_BT = F.cross_entropy(model(batch.ids_BT).transpose(1, 2), batch.targets_BT, reduction="none")
    ce_BT = ce_BT * batch.target_mask_BT
    return torch.stack([(ce_BT * (batch.target_modality_BT == m)).sum() for m in range(2)]) / batch.step_targets


def measure(which: list[int], collective: bool) -> dict[str, float]:
    model, batch = make_model(), rows(which)
    values = gradient_agreement(model, batch, lambda half: parts(model, half))
    window, optimizer = BudgetWindow(model, [0, 1]), torch.optim.AdamW(model.parameters(), lr=0.01)
    parts_M = parts(model, batch)
    window.add_gradients(parts_M)
    parts_M.sum().backward()
    for p in model.parameters():  # as data parallelism does
        assert p.grad is not None
        if collective:
            dist.all_reduce(p.grad)
    window.before_update(optimizer, None)
    optimizer.step()
    window.after_update(optimizer)
    window.settle()
    return values | window.values()


def of_rank(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    values = measure([0, 1, 2] if rank == 0 else [3, 4, 5], collective=True)
    torch.save(values, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_measure_what_one_does(tmp_path):
    mp.spawn(of_rank, (free_port(), str(tmp_path)), nprocs=2)
    both = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    expected = measure(list(range(SEQUENCES)), collective=False)
    assert both[0] == both[1] and both[0].keys() == expected.keys()
    for tag, value in expected.items():
        tolerance = 1e-6 if "growth_rest" in tag else 1e-9  # the rest is only rounding errors
        assert both[0][tag] == pytest.approx(value, rel=1e-3, abs=tolerance), tag
    # The control: one rank alone measures different values.
    alone = measure([3, 4, 5], collective=False)
    for tag in ("grad_noise/text", "w_q_growth/image/layer01"):
        assert alone[tag] != pytest.approx(expected[tag], rel=1e-2), tag
