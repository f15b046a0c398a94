"""Two processes, each with half of the sequences, measure the same values as one process with all sequences."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mmqk.data.batch import TokenBatch
from mmqk.monitors.own.callback import gradient_agreement
from mmqk.monitors.own.updates import BudgetWindow
from tests.training.ranks import free_port
from tests.training.toy import module_of, toy_batch

SEQUENCES = range(6)  # three for each process: an odd number


def measure(which: Sequence[int], collective: bool) -> dict[str, float]:
    # In fp64, because the first Adam step turns gradients that are only rounding errors into full-size steps.
    module, batch = module_of(), toy_batch(0, B=6, T=30)
    model = module.model
    batch.ids_BT[:3] %= 9  # the first rank has no image token
    batch.modality_BT[:3] = 0
    batch = batch._map(lambda tensor: tensor[list(which)] if tensor.ndim else tensor)

    def parts(batch: TokenBatch) -> torch.Tensor:
        return module.losses(batch).ce / batch.step_targets

    values = gradient_agreement(model, batch, parts)
    window, optimizer = BudgetWindow(model, [0, 1]), torch.optim.AdamW(model.parameters(), lr=0.01)
    parts_M = parts(batch)
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
    values = measure(SEQUENCES[3 * rank : 3 * rank + 3], collective=True)
    torch.save(values, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_measure_what_one_does(tmp_path):
    mp.spawn(of_rank, (free_port(), str(tmp_path)), nprocs=2)
    both = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    expected = measure(SEQUENCES, collective=False)
    assert both[0] == both[1] and both[0].keys() == expected.keys()
    for tag, value in expected.items():
        tolerance = 1e-6 if "growth_rest" in tag else 1e-9  # the rest is only rounding errors
        assert both[0][tag] == pytest.approx(value, rel=1e-3, abs=tolerance), tag
    # The control: one rank alone measures different values.
    alone = measure(SEQUENCES[3:], collective=False)
    for tag in ("grad_noise/text", "w_q_growth/image/layer01"):
        assert alone[tag] != pytest.approx(expected[tag], rel=1e-2), tag
