"""Trains for 20 steps in the Trainers of Lightning and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.monitors.attach.nets import Net, batches, loss_of

IMAGE = {"image": range(10, 40)}


def lightning_run(out: Path, watched: bool = True, logger: Any = False):
    """Train a LightningModule whose ``net`` is watched, and return the weights of ``net``."""
    import lightning as L

    from mmqk.monitors import NormMonitor

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net(dropout=0.1)

        def on_fit_start(self):
            self.batches = batches(20, B=2, seed=0)

        def train_dataloader(self):
            return torch.utils.data.DataLoader(self.batches, batch_size=None)

        def configure_model(self):
            self.net.compile(backend="eager", fullgraph=True)

        def training_step(self, ids, i):
            return loss_of(self.net(ids), ids)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-3)

    torch.manual_seed(0)
    monitor = NormMonitor(model="net", modality=IMAGE, every_n_steps=20, sequences=2, out=out, optimizer=True)
    callbacks = [monitor] if watched else []
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=logger, callbacks=callbacks, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    module = Module()
    trainer.fit(module)
    assert not watched or monitor.watch.output.rules.max_steps == 20  # the batches of the epoch
    return module.net.state_dict()


def transformers_run(out: Path, watched: bool = True, report_to: str = "none"):
    """Train a Llama with transformers' Trainer, and return its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from mmqk.monitors.transformers import NormCallback

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                    num_key_value_heads=2, max_position_embeddings=64, attention_dropout=0.1)
    )  # fmt: skip
    rows = [{"input_ids": ids, "labels": ids} for batch in batches(40, B=2, seed=0) for ids in batch]
    args = TrainingArguments(
        str(out.parent / "trainer"), max_steps=20, per_device_train_batch_size=2, learning_rate=1e-3, use_cpu=True,
        report_to=report_to, save_strategy="no", logging_steps=25, disable_tqdm=True, seed=0,
        torch_compile=True, torch_compile_backend="eager",
    )  # fmt: skip
    callback = NormCallback(IMAGE, every_n_steps=20, sequences=2, out=out, optimizer=True)
    callbacks = [callback] if watched else []
    trainer = Trainer(model, args, train_dataset=rows, callbacks=callbacks)
    trainer.train()
    return model.state_dict()
