"""Trains for 20 steps in the Trainers of Lightning and transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.monitors.attach.nets import Net, batches, loss_of

IMAGE = {"image": range(10, 40)}


def lightning_run(out: Path, fsdp: bool = False, compiled: bool = False, watched: bool = True, logger: Any = False):
    """Train a LightningModule whose ``net`` is watched, and return the weights of ``net``."""
    import lightning as L

    from mmqk.monitors import NormMonitor

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net(dropout=0.1)

        def configure_model(self):
            if fsdp:
                for layer in self.net.layers:
                    fully_shard(layer)
                fully_shard(self.net)
            if compiled:
                self.net.compile(backend="eager", fullgraph=True)

        def training_step(self, ids, i):
            return loss_of(self.net(ids), ids)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-3)

    if fsdp:  # Lightning's FSDP strategy needs a GPU
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    monitor = NormMonitor(model="net", modality=IMAGE, every_n_steps=20, sequences=2, out=out, optimizer=True)
    callbacks = [monitor] if watched else []
    trainer = L.Trainer(
        max_steps=20, accelerator="cpu", devices=1, logger=logger, callbacks=callbacks, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        **({"plugins": [_alone()]} if fsdp else {}),
    )  # fmt: skip
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(_rows(20, dist.get_rank() if fsdp else 0), batch_size=None))
    if fsdp:
        dist.destroy_process_group()
    return module.net.state_dict()


def _alone():
    """Return an environment with world size 1 for Lightning, although the test runs two processes: torch's process
    group connects them."""
    from lightning.fabric.plugins.environments import LightningEnvironment

    return LightningEnvironment()


def _rows(n: int, seed: int):
    return batches(n, B=2, seed=seed)


def transformers_run(
    out: Path, fsdp: bool = False, compiled: bool = False, watched: bool = True, report_to: str = "none"
):
    """Train a Llama with transformers' Trainer, and return its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from mmqk.monitors.transformers import NormCallback

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                    num_key_value_heads=2, max_position_embeddings=64, attention_dropout=0.1)
    )  # fmt: skip
    options: dict[str, Any] = {}
    if fsdp:  # on a CPU the Trainer ignores its FSDP setting: shard the model here
        dist.init_process_group("gloo")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    seed = dist.get_rank() if fsdp else 0
    rows = [{"input_ids": ids, "labels": ids} for batch in batches(40, B=2, seed=seed) for ids in batch]
    if compiled:
        options |= {"torch_compile": True, "torch_compile_backend": "eager"}
    args = TrainingArguments(
        str(out.parent / "trainer"), max_steps=20, per_device_train_batch_size=2, learning_rate=1e-3, use_cpu=True,
        report_to=report_to, save_strategy="no", logging_steps=25, disable_tqdm=True, seed=0, **options,
    )  # fmt: skip
    callback = NormCallback(IMAGE, every_n_steps=20, sequences=2, out=out, optimizer=True)
    callbacks = [callback] if watched else []
    trainer = Trainer(model, args, train_dataset=rows, callbacks=callbacks)
    trainer.train()
    if fsdp:
        assert all(isinstance(p, torch.distributed.tensor.DTensor) for p in model.parameters())
        dist.destroy_process_group()
    return model.state_dict()
