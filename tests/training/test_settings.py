"""The private parts of Lightning that mmqk uses exist."""

import importlib

import lightning as L
from lightning.pytorch.strategies import ModelParallelStrategy


def test_the_private_parts_exist():
    """Another version of Lightning may rename a private part; assigning to the old name would then have no effect."""
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    assert callable(trainer._signal_connector.register_signal_handlers)
    assert callable(trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor)
    assert callable(ModelParallelStrategy._setup_distributed)
    assert importlib.import_module("lightning.pytorch.trainer.connectors.checkpoint_connector")
