"""The loggers record every value of metrics.jsonl once, even after an error and a resume; TensorBoard has its values.

What MLflow has is read back; what W&B gets is recorded by a stand-in logger."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sqlite3
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers.logger import DummyLogger

from mmqk.config import resolve
from mmqk.store import Alarm, read_metrics
from mmqk.train import main
from mmqk.training.loggers import Integration, RunLogger
from mmqk.training.saving import Checkpoints
from tests.training.runs import WHOLE, series

# TensorBoard ------------------------------------------------------------------------------------------------


def accumulated(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    found.Reload()
    return found


def test_values_are_those_of_metrics_jsonl(whole):
    found = accumulated(whole)
    lines = {line["step"]: line for line in read_metrics(whole / "metrics.jsonl")}
    assert len(found.Scalars("loss/image")) == 12
    for event in found.Scalars("loss/image"):
        assert event.value == pytest.approx(lines[event.step]["loss/image"], rel=1e-6)
    steps = [event.step for event in found.Scalars("attn_logit_absmax/text-image/max")]
    assert steps == [0, 4, 8, 12]
    for event in found.Scalars("attn_logit_absmax/text-image/max"):
        layers = [lines[event.step][f"attn_logit_absmax/text-image/layer{i:02d}"] for i in range(2)]
        assert event.value == pytest.approx(max(layers), rel=1e-6) != pytest.approx(min(layers), rel=1e-6)


# W&B and MLflow ---------------------------------------------------------------------------------------------


# A warning of SQLAlchemy, which mlflow uses.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")


def of_mlflow(run: Path) -> list[dict[str, Any]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run}/mlflow.db")
    logged = client.get_run(json.loads((run / "loggers.json").read_text())["mlflow"]["id"])
    steps: dict[int, dict[str, Any]] = {}
    for name in logged.data.metrics.keys() - {"tokens_per_s"}:
        for metric in client.get_metric_history(logged.info.run_id, name):
            line = steps.setdefault(metric.step, {"step": metric.step})
            assert name not in line, f"{name} has step {metric.step} twice"
            line[name] = metric.value
    return [steps[step] for step in sorted(steps)]


@pytest.fixture(scope="module")
def args(tiny_args) -> Iterator[list[str]]:
    """Yield the command line of a run with every installed logger, in offline mode."""
    for module in ("mlflow", "sqlalchemy"):
        pytest.importorskip(module, reason="mlflow is not installed: pip install 'mmqk[mlflow]'")
    names = ["mlflow", *["wandb"] * (find_spec("wandb") is not None)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        for name in ("WANDB_PROJECT", "WANDB_RUN_ID", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
            patch.delenv(name, raising=False)
        yield [*tiny_args, *WHOLE, f"--logging=[{','.join(names)}]"]


@pytest.fixture(scope="module")
def broken(args, tmp_path_factory) -> Path:
    """Train a run whose process fails at step 7; its newest checkpoint is of step 4."""
    out = tmp_path_factory.mktemp("logged") / "run"
    real = Checkpoints.on_train_batch_end

    def fails(self, trainer, *others):
        real(self, trainer, *others)
        if trainer.global_step == 7:
            raise RuntimeError("the machine is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "on_train_batch_end", fails)
        with pytest.raises(RuntimeError, match="the machine is gone"):
            main([*args, f"--out={out}"])
    assert [line["step"] for line in series(out)] == list(range(8))
    return out


@pytest.fixture(scope="module")
def resumed(broken, args, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("resumed") / "run"
    shutil.copytree(broken, out, symlinks=True)
    assert main([*args, f"--out={out}"]) == 0
    return out


@pytest.mark.slow
def test_loggers_have_every_value_once_after_an_error_and_a_resume(args, broken, resumed, whole, tiny_args):
    assert of_mlflow(broken) == series(broken)
    lines = series(resumed)
    assert of_mlflow(resumed) == lines == series(whole) and [line["step"] for line in lines] == list(range(13))
    assert "q_norm/text/layer01" in lines[12] and "val_loss/image" in lines[12]
    before, after = (json.loads((run / "loggers.json").read_text()) for run in (broken, resumed))
    for name in before:  # the resume continues the run of the logger
        assert before[name]["id"] == after[name]["id"] and (before[name]["step"], after[name]["step"]) == (-1, 7)
    assert resolve(args).id == resolve([*tiny_args, *WHOLE]).id != resolve([*args, "--seed=1"]).id


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["steps", "id"])
def test_mlflow_gets_the_steps_that_a_killed_process_had_not_sent(args, broken, tmp_path, lost):
    """The control: without the stored id, the resume begins another run and sends it the steps before."""
    out = tmp_path / "run"
    shutil.copytree(broken, out, symlinks=True)
    if lost == "steps":
        with contextlib.closing(sqlite3.connect(out / "mlflow.db")) as store:
            store.execute("DELETE FROM metrics WHERE step >= 6")
            store.commit()
        assert [line["step"] for line in of_mlflow(out)] == list(range(6))
    else:
        (out / "loggers.json").unlink()
    assert main([*args[:-1], "--logging=[mlflow]", f"--out={out}"]) == 0
    assert of_mlflow(out) == series(out) and len(series(out)) == 13
    ids = [json.loads((run / "loggers.json").read_text())["mlflow"]["id"] for run in (broken, out)]
    assert (ids[0] == ids[1]) == (lost == "steps")


# The logger alone -------------------------------------------------------------------------------------------


class Kept(DummyLogger):
    """Record the calls, and raise an error in call number ``fails``, counted from 0."""

    def __init__(self, fails: int | None = None):
        super().__init__()
        self.calls: list[tuple[int, dict[str, float]]] = []
        self.fails = fails

    def log_metrics(self, metrics, step):
        self.calls.append((step, metrics))
        if len(self.calls) - 1 == self.fails:
            raise ConnectionError("no route")


def test_the_values_of_a_step_are_one_call_and_alarms_are_sent(tmp_path):
    kept = Kept()
    logger = RunLogger(tmp_path / "metrics.jsonl", Integration(tmp_path, "wandb", kept, step=1))
    for step in (1, 2, 3):
        logger.log_metrics({"loss": float(step)}, step)
        logger.log_metrics({"q_norm/text/layer00": math.inf}, step)
    logger.log_alarms([Alarm("spike", 2, "loss", 1.0, 1.0, "high")])
    logger.save()
    both = {"q_norm/text/layer00": math.inf}
    assert kept.calls == [(2, {"loss": 2.0, **both}), (3, {"loss": 3.0, **both}), (2, {"alarm/spike": 1})]


def test_a_lost_connection_does_not_end_the_run_and_is_printed_once(tmp_path, capsys):
    kept = Kept(fails=1)
    logger = RunLogger(tmp_path / "metrics.jsonl", Integration(tmp_path, "mlflow", kept, step=-1))
    for step in range(5):
        logger.log_metrics({"loss": 1.0}, step)
    logger.finalize("success")
    assert [step for step, _ in kept.calls] == [0, 1]
    assert capsys.readouterr().err == "mlflow gets no further values (no route); metrics.jsonl has all values.\n"
