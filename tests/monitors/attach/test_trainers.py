"""Tests a watched model in the Trainers of Lightning and transformers."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmqk.monitors.formulas.reduce import over_layers
from mmqk.store import read_metrics
from tests.monitors.attach.nets import Net, batches, loss_of
from tests.monitors.attach.trainers import lightning_run, transformers_run


def test_lightning_logs_to_the_trainers_loggers_and_trains_the_same_weights(tmp_path):
    pytest.importorskip("lightning")
    from lightning.pytorch.loggers import CSVLogger

    torch._dynamo.reset()
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    logged: dict[int, dict] = {}
    logger.log_metrics = lambda values, step: logged.setdefault(step, values)  # type: ignore[method-assign]
    watched = lightning_run(tmp_path / "run", logger=logger)
    plain = lightning_run(tmp_path / "other", watched=False)
    assert watched.keys() == plain.keys() and all(torch.equal(x, plain[name]) for name, x in watched.items())
    assert list(logged) == [10, 20]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [{"step": step, **values} for step, values in logged.items()] == [x | over_layers(x) for x in lines]
    norms = [lines[0][f"q_norm/image/layer{n:02d}"] for n in range(3)]
    assert logged[10]["q_norm/image/max"] == max(norms)
    assert logged[10]["q_norm/image/median"] == np.median(norms) != max(norms)
    assert "attn_logit_absmax/text-image/layer02" in logged[20] and logged[20]["attn_layers_seen"] == 3
    assert logged[20]["update_norm"] > 0 < logged[20]["grad_norm"]


def test_transformers_reports_where_its_trainer_does_and_trains_the_same_weights(tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    from transformers.integrations import TensorBoardCallback

    torch._dynamo.reset()
    reported: dict[int, dict] = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "attn_layers_seen" in logs:
            reported[state.global_step] = logs

    monkeypatch.setattr(TensorBoardCallback, "__init__", lambda self: None)
    monkeypatch.setattr(TensorBoardCallback, "on_log", on_log)
    monkeypatch.setattr(TensorBoardCallback, "on_train_begin", lambda *args, **kwargs: None)
    monkeypatch.setattr(TensorBoardCallback, "on_train_end", lambda *args, **kwargs: None)
    watched = transformers_run(tmp_path / "run", report_to="tensorboard")
    plain = transformers_run(tmp_path / "other", watched=False)
    assert watched.keys() == plain.keys() and all(torch.equal(x, plain[name]) for name, x in watched.items())
    assert list(reported) == [10, 20]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [{"step": step, **values} for step, values in reported.items()] == [x | over_layers(x) for x in lines]
    assert lines[0]["attn_layers_seen"] == 3 and "q_raw_norm/image/layer02" in lines[0]
    assert lines[1]["update_norm"] > 0 and lines[1]["clip_factor"] <= 1


def test_transformers_reports_the_losses_that_wait_at_the_end():
    pytest.importorskip("transformers")
    from mmqk.monitors.transformers import NormCallback

    callback, state = NormCallback(), SimpleNamespace(global_step=25, epoch=None, log_history=[])
    callback.watch = SimpleNamespace(close=lambda: callback._store({"loss/text": 1.0}, 25))  # type: ignore[assignment]
    callback.on_train_end(None, state, None)
    assert state.log_history == [{"loss/text": 1.0, "step": 25}]


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError(), "failed"), (KeyboardInterrupt(), "interrupted"), (None, "completed")]
)
def test_a_run_that_breaks_off_is_not_called_complete(error, status, tmp_path):
    """The watched model is the LightningModule itself."""
    L = pytest.importorskip("lightning")
    from mmqk.monitors import NormMonitor

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net(["sdpa"])

        def forward(self, ids):
            return self.net(ids)

        def training_step(self, ids, i):
            if error is not None and i == 3:
                raise error
            return loss_of(self(ids), ids)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-3)

    monitor = NormMonitor("", {"image": range(10, 40)}, every_n_steps=2, out=tmp_path)
    trainer = L.Trainer(
        max_steps=4, accelerator="cpu", devices=1, logger=False, callbacks=[monitor], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(Module(), torch.utils.data.DataLoader(batches(8), batch_size=None))
    except (ValueError, SystemExit, KeyboardInterrupt) as raised:
        assert error is not None, raised
    status_file = json.loads((tmp_path / "status.json").read_text())
    assert status_file == {"status": status, "step": 4 if error is None else 3}
