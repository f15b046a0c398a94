"""Trains a watched model under FSDP or DDP in one of two processes. torch.distributed.run starts it.

Usage: train_foreign.py WAY OUT, where WAY is plain or failing.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mmqk.monitors import attach
from tests.monitors.attach.nets import Net, batches, loss_of

IMAGE, STEPS = {"image": range(10, 40)}, 50


def sharded(net):
    for layer in net.layers:
        fully_shard(layer)
    return fully_shard(net)


def of_rank(n: int) -> list[torch.Tensor]:
    """Return n batches, different on each rank; batch 9 of the first rank is all text."""
    given = batches(n, B=2, seed=dist.get_rank())
    if dist.get_rank() == 0:
        given[9] = given[9] % 10
    return given


def whole(net) -> dict[str, list]:
    full = {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in net.state_dict().items()}
    return {name: x.flatten().tolist() for name, x in full.items()}


def plain(out: Path) -> None:
    weights = {}
    for watched in (True, False):
        net = sharded(Net(dropout=0.1))
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
        watch = attach(net, modality=IMAGE, every_n_steps=20, sequences=2, out=out / "run") if watched else None
        torch.manual_seed(dist.get_rank())
        for step, ids in enumerate(of_rank(STEPS)):
            loss_of(net(ids), ids).backward()
            optimizer.step()
            optimizer.zero_grad()
            if watch is not None:
                watch.step()
                if step == 9:
                    weights["at 10"] = whole(net)
        weights["on" if watched else "off"] = whole(net)
        if watch is not None:
            # A probe must not leave gathered weights behind, because the next forward would use these old weights.
            watch.probe(ids=ids)
            watch.close()
    if dist.get_rank() == 0:
        (out / "weights.json").write_text(json.dumps(weights))


def failing(out: Path) -> None:
    """Train under DDP, where the probe of the second rank fails in a layer at step 4 and in the modality function at
    step 6."""
    weights, now = {}, 0

    def modality(inputs):
        if now == 6 and dist.get_rank():
            raise KeyError("no modality")
        return (inputs["ids"] > 9).long()

    def fail(module, args):
        if now == 4 and dist.get_rank() and not module.training:
            raise ValueError("a layer of the second rank")

    for watched in (True, False):
        net = Net(dropout=0.1)
        net.layers[2].register_forward_pre_hook(fail)
        called = torch.nn.parallel.DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
        watch = attach(called, modality=modality, every_n_steps=2, out=out / "run") if watched else None
        torch.manual_seed(dist.get_rank())
        for step, ids in enumerate(of_rank(10)[:8], start=1):
            now = step
            loss_of(called(ids), ids).backward()
            optimizer.step()
            optimizer.zero_grad()
            if watch is not None:
                watch.step()
        weights["on" if watched else "off"] = whole(net)
    if dist.get_rank() == 0:
        (out / "weights.json").write_text(json.dumps(weights))


def main(way: str, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plain(out) if way == "plain" else failing(out)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    main(sys.argv[1], Path(sys.argv[2]))
