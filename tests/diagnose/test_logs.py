"""Logs: the same series in every format gives the same table; the tools write it where they are installed."""

from __future__ import annotations

import gzip
import json
import math
import sqlite3
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mmqk.diagnose.logs import read_log
from mmqk.diagnose.names import step_of, tag_of
from mmqk.store import MetricsWriter, UserError

STEPS = range(1, 61)


def series(seed: int = 0) -> pd.DataFrame:
    """A run with a NaN, an infinity, and a held-out loss every 20 steps."""
    random = np.random.default_rng(seed)
    table = pd.DataFrame({"loss": 3 + random.random(60), "grad_norm": random.lognormal(size=60)}, index=STEPS)
    table = table.astype(np.float32).astype(float)  # event files have float32
    table["val_loss"] = table["loss"].where(table.index % 20 == 0)
    table.loc[41, "loss"] = math.nan
    table.loc[47, "grad_norm"] = math.inf
    return table


def rows(table: pd.DataFrame):
    """Yield (step, {tag: value}) without what was not logged; a NaN of the loss was logged."""
    for step, row in table.iterrows():
        yield step, {tag: value for tag, value in row.items() if tag != "val_loss" or step % 20 == 0}


def text_of(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if math.isinf(value) else repr(value)


def wandb_csv(table, path):
    lines = ['"Step","sun-1 - train/loss","sun-1 - train/loss__MIN","sun-1 - train/grad_norm","sun-1 - eval/loss"']
    for step, row in rows(table):
        loss, norm = text_of(row["loss"]), text_of(row["grad_norm"])
        lines.append(f'"{step}","{loss}","{loss}","{norm}","{row.get("val_loss", "")}"')
    (path / "export.csv").write_text("\n".join(lines) + "\n")
    return path / "export.csv"


def semicolons(table, path):
    lines = ["iteration;train loss;gnorm;val loss"]
    for step, row in rows(table):
        lines.append(f"{step};{row['loss']};{row['grad_norm']};{row.get('val_loss', '')}".replace(".", ","))
    (path / "log.csv").write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines, "61;2"]).encode())
    return path / "log.csv"


def json_lines(table, path):
    lines = [json.dumps({"step": s, "train": {"loss": r["loss"], "grad_norm": r["grad_norm"]}}) for s, r in rows(table)]
    lines += [json.dumps({"step": s, "eval/loss": r["val_loss"]}) for s, r in rows(table) if "val_loss" in r]
    with gzip.open(path / "log.jsonl.gz", "wt") as file:
        file.write("\n".join([json.dumps({"config": {"lr": 1e-3}}), *lines, '{"step": 61, "tra']))
    return path / "log.jsonl.gz"


def trainer_state(table, path):
    history = []
    for step, row in rows(table):
        history.append({"epoch": step / 60, "step": step, "loss": row["loss"], "grad_norm": row["grad_norm"]})
        history += [{"epoch": step / 60, "step": step, "eval_loss": row["val_loss"]}] if "val_loss" in row else []
    (path / "checkpoint-60").mkdir()
    state = {"global_step": 60, "max_steps": 100, "best_metric": None, "log_history": history}
    (path / "checkpoint-60" / "trainer_state.json").write_text(json.dumps(state, indent=2))
    return path


def wandb_history(table, path):
    """A table with an empty cell as null, as pandas writes it."""
    records = [
        {"_step": i, "_runtime": i * 0.1, "train/global_step": s, "train/loss": text_of(r["loss"])}
        | {"train/grad_norm": text_of(r["grad_norm"]), "eval/loss": r.get("val_loss")}
        for i, (s, r) in enumerate(rows(table))
    ]
    (path / "history.json").write_text(json.dumps(records))
    return path / "history.json"


def megatron(table, path):
    lines = [" num_layers ............................ 12"]
    for step, row in rows(table):
        lines.append(
            f" [2026-01-01 10:00:00] iteration {step:8d}/     100 | consumed samples: {step * 512:12d} | elapsed time"
            f" per iteration (ms): 1234.5 | lm loss: {row['loss']:.9E} | loss scale: 1.0 | grad norm:"
            f" {row['grad_norm']:.9f} | number of skipped iterations:   0 |"
        )
        if "val_loss" in row:
            lines.append(f" validation loss at iteration {step} | val loss value: 1.0 | val loss: {row['val_loss']!r}")
    (path / "slurm.out").write_text("\n".join(lines))
    return path / "slurm.out"


def torchtitan(table, path):
    lines = []
    for step, row in rows(table):
        for rank in (0, 1):
            head = f"[rank{rank}]:[titan] 2026-01-01 10:00:00,123 - root - INFO - "
            lines.append(
                f"{head}\x1b[31mstep: {step:2d}  \x1b[32mloss: {row['loss'] + rank!r}  \x1b[38;2;1;2;3mgrad_norm:"
                f" {row['grad_norm']!r}  \x1b[34mmemory: 0.98GiB(1.0%)  tps: 1,234\x1b[39m"
            )
        if "val_loss" in row:
            lines.append(f"[rank0]:[titan] 2026-01-01 10:00:00,123 - root - INFO - validate step: {step}")
            lines.append(f"[rank0]:[titan] 2026 - root - INFO - step: {step}  val_loss: {row['val_loss']!r}")
    (path / "titan.log").write_text("\n".join(lines))
    return path / "titan.log"


def olmo(table, path):
    lines = []
    for step, row in rows(table):
        lines.append(f"2026-08-08 12:01:00 INFO [olmo_core.train:68] [step={step}/2000,epoch=1,eta=5h11m]")
        lines += [f"    train/CE loss={row['loss']!r}", f"    optim/total grad norm={row['grad_norm']!r}"]
        lines += [f"    eval/CE loss={row['val_loss']!r}"] if "val_loss" in row else []
        lines += [f"2026-08-08 12:03:10 INFO [olmo_core.train:1003] Saving checkpoint for step {step} to 's3://b/k'..."]
    (path / "olmo.log").write_text("\r\n".join(lines))
    return path / "olmo.log"


def nanogpt(table, path):
    lines = []
    for step, row in rows(table):
        if "val_loss" in row:
            lines.append(f"step {step}: train loss 3.5, val loss {row['val_loss']!r}")
        lines.append(f"iter {step}: loss {row['loss']!r}, norm {row['grad_norm']!r}, time 123.45ms, mfu -100.00%")
    (path / "train.log").write_text("\n".join(lines), encoding="utf-16")
    return path / "train.log"


def plain(table, path):
    lines = []
    for step, row in rows(table):
        lines.append(f"it {step} loss={row['loss']} grad_norm={row['grad_norm']} lr 1e-3")
        lines += [f"   val_loss={row['val_loss']}"] if "val_loss" in row else []
    (path / "out.txt").write_text("\n".join(lines))
    return path / "out.txt"


def tensorboard(table, path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(path / "runs") as writer:
        for step, row in rows(table):
            writer.add_scalar("train/loss", row["loss"], step)
            writer.add_scalar("train/grad_norm", row["grad_norm"], step, new_style=True)
            if "val_loss" in row:
                writer.add_scalar("eval/loss", row["val_loss"], step)
    file = next((path / "runs").iterdir())
    file.write_bytes(file.read_bytes() + b"\x30\x00\x00\x00\x00\x00\x00\x00half")  # the process was killed
    return path


def lightning(table, path):
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(path)
    logger.log_hyperparams({"lr": 1e-3, "n_layer": 3})
    for step, row in rows(table):
        logger.log_metrics({"train_loss": row["loss"], "grad_norm": row["grad_norm"]}, step)
        if "val_loss" in row:
            logger.log_metrics({"val_loss": row["val_loss"]}, step)
    logger.save()
    return path


def mlflow_folder(table, path):
    run = path / "mlruns" / "0" / "ab12"
    for folder in ("metrics/train", "params"):
        (run / folder).mkdir(parents=True)
    (run / "meta.yaml").write_text("run_id: ab12\n")
    (run / "params" / "lr").write_text("0.001")
    for tag, name in {"loss": "train/loss", "grad_norm": "train/grad_norm", "val_loss": "eval_loss"}.items():
        lines = [f"{1700000000000 + s} {r[tag]} {s}" for s, r in rows(table) if tag in r]
        (run / "metrics" / name).write_text("\n".join(lines) + "\n")
    return path / "mlruns"


def mlflow_base(table, path):
    with sqlite3.connect(path / "mlflow.db") as base:
        base.execute("create table metrics (key, value, timestamp, run_uuid, step, is_nan)")
        base.execute("create table params (key, value, run_uuid)")
        for step, row in rows(table):
            for tag, value in row.items():
                stored = 0.0 if math.isnan(value) else min(value, 1.7976931348623157e308)
                base.execute(
                    "insert into metrics values (?, ?, ?, 'r', ?, ?)", (tag, stored, step, step, math.isnan(value))
                )
    return path


def mmqk(table, path):
    writer = MetricsWriter(path / "metrics.jsonl")
    for step, row in rows(table):
        writer.write(step, row)
    writer.close()
    return path


WRITERS = (
    wandb_csv, semicolons, json_lines, trainer_state, wandb_history, megatron, torchtitan, olmo, nanogpt, plain,
    tensorboard, pytest.param(lightning, marks=pytest.mark.slow), mlflow_folder, mlflow_base, mmqk,
)  # fmt: skip


@pytest.mark.parametrize("write", WRITERS)
def test_the_same_series_in_every_format_gives_the_same_table(tmp_path, write):
    table = series()
    log = read_log(write(table, tmp_path))
    expected = table.copy()
    expected.loc[41, "loss"] = expected.loc[47, "grad_norm"] = np.inf
    read = log.metrics[["loss", "grad_norm", "val_loss"]]
    assert read.index.name == "step" and read.index.is_monotonic_increasing and read.index.is_unique
    pd.testing.assert_frame_equal(read, expected, check_names=False, rtol=1e-6, check_index_type=False)
    # negative control: another run is another table
    assert not np.allclose(read["loss"].replace(np.inf, 0), series(1)["loss"].fillna(0), atol=1e-3)


@pytest.mark.slow
def test_wandb_run_folder(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="p", dir=tmp_path, config={"lr": 0.25, "model": {"n_layer": 2}})
    for step, row in rows(series()):
        run.log({f"train/{tag}": value for tag, value in row.items() if tag != "val_loss"} | {"note": "x" * 3000}, step)
    run.finish()
    log, until = read_log(tmp_path), time.monotonic() + 30
    while len(log.metrics) < len(series()) and time.monotonic() < until:  # W&B's process may still write
        time.sleep(0.5)
        log = read_log(tmp_path)
    expected = series().fillna(np.inf)
    pd.testing.assert_series_equal(log.metrics["loss"], expected["loss"], check_names=False, check_index_type=False)
    assert log.config["optim.lr"] == 0.25 and log.config["model.n_layers"] == 2


def jsonl(path: Path, records) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def test_a_restart_replaces_all_columns_from_its_step_on(tmp_path):
    life = [{"step": s, "loss": 1.0} | ({"eval_loss": 1.0} if s % 10 == 0 else {}) for s in range(56)]
    again = [{"step": s, "loss": 2.0} for s in range(35, 45)]  # killed before its evaluation at step 50
    log = read_log(jsonl(tmp_path / "log.jsonl", life + again))
    assert log.metrics["loss"].tolist() == [1.0] * 35 + [2.0] * 10
    assert log.metrics["val_loss"].dropna().index.tolist() == [0, 10, 20, 30]  # 40 and 50 belong to the first life
    assert any("at step 35 " in note for note in log.notes)
    # negative controls: without a restart no note; the last value of a repeated step counts
    whole = read_log(jsonl(tmp_path / "whole.jsonl", life))
    assert not any("restart" in note or "more than once" in note for note in whole.notes)
    twice = read_log(jsonl(tmp_path / "twice.jsonl", [*life, {"step": 55, "loss": 9.0}]))
    assert twice.metrics["loss"].iloc[-1] == 9.0 and any("more than once" in note for note in twice.notes)


def test_steps_within_epochs_go_on(tmp_path):
    bar = [
        f"\rEpoch {e}: {i}0%|x | {i}/10 [00:10<01:30, v_num=0, train_loss={e}.{i:02d}]"
        for e in range(3)
        for i in range(1, 11)
    ]
    (tmp_path / "out.log").write_text("".join(bar))
    metrics = read_log(tmp_path / "out.log").metrics
    assert metrics.index.tolist() == list(range(1, 31)) and metrics["loss"].is_monotonic_increasing


@pytest.mark.parametrize(
    ("column", "unit", "index"),
    [("step", 524_288, True), ("consumed samples", 100, True), ("step", 100, False), ("step", 1024, False)],
)
def test_steps_that_count_samples_or_tokens_become_an_index(tmp_path, column, unit, index):
    log = read_log(jsonl(tmp_path / "log.jsonl", [{column: unit * i, "loss": 1.0} for i in range(1, 30)]))
    assert log.metrics.index.tolist() == [i * (1 if index else unit) for i in range(1, 30)]
    assert any("samples or tokens" in note for note in log.notes) == index


@pytest.mark.parametrize(
    ("cell", "value"),
    [("2.5", 2.5), ("tensor(2.5)", 2.5), ("\"tensor(2.5, device='cuda:0')\"", 2.5), ("tensor(nan)", np.inf)],
)
def test_thousands_separators_and_tensors_are_numbers(tmp_path, cell, value):
    rows = [f'"{step:,}",{cell if step > 1000 else 2.0}' for step in range(0, 2000, 10)]
    (tmp_path / "run.csv").write_text("\n".join(["step,loss", *rows]))
    loss = read_log(tmp_path / "run.csv").metrics["loss"]
    assert loss.index.tolist() == list(range(0, 2000, 10)) and set(loss.loc[1010:]) == {value}


def test_null_is_nan_after_numbers_and_an_empty_cell_between_them(tmp_path):
    records = [
        {"step": s, "loss": 3.0 if s < 30 else None, "grad_norm": 1.0 if s % 3 == 0 else None} for s in range(40)
    ]
    metrics = read_log(jsonl(tmp_path / "log.jsonl", records)).metrics
    assert np.isinf(metrics["loss"].loc[30:]).all() and np.isfinite(metrics["loss"].loc[:29]).all()
    assert np.isfinite(metrics["grad_norm"].dropna()).all()
    # rows of evaluations, and of a summary at the end, have no training loss
    rows = [{"current_steps": s, "loss": None if s in (15, 29, 30) else 3.0, "eval_loss": None} for s in range(31)]
    loss = read_log(jsonl(tmp_path / "log.jsonl", rows)).metrics["loss"].dropna()
    assert loss.index.tolist() == [*range(15), *range(16, 29)] and set(loss) == {3.0}


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        ("step {} | loss 2.0", "[val] step {} loss 3.0"),
        (
            "| train_inner | epoch 001: 1 / 9 loss=2.0, num_updates={}",
            "| valid | epoch 001 | loss 3.0 | num_updates {}",
        ),
        ("completed step: {}, weights: 9, loss: 2.0", "eval metrics after step: {}, loss=3.0, weights=9"),
        ("[test] step {} loss 2.0", "z_loss: 1 [test] step {} val_loss 3.0"),  # the word is in the name of the run
        (
            "iteration {}/ 99 | lm loss: 2.0",
            "validation loss at iteration {} | lm loss value: 3.0E+00 | lm loss PPL: 9 |",
        ),
        ("{} | loss 2.0 | lr 1e-3", "step {}: train loss 2.5, val loss 3.0"),
        ("s:{} trl:2.0", "s:{} tel:3.0"),
        ('{{"step": {}, "split": "train", "loss": 2.0}}', '{{"step": {}, "split": "Val", "loss": 3.0}}'),
    ],
)
def test_a_loss_of_an_evaluation_is_no_training_loss(tmp_path, train, held_out):
    lines = [text.format(step) for step in range(1, 41) for text in ([train, held_out] if step % 20 == 0 else [train])]
    (tmp_path / "out.log").write_text("\n".join(lines))
    metrics = read_log(tmp_path / "out.log").metrics
    assert metrics["loss"].to_dict() == dict.fromkeys(range(1, 41), 2.0)
    assert metrics["val_loss"].dropna().to_dict() == {20: 3.0, 40: 3.0}


@pytest.mark.parametrize("bad", [range(200, 260), [398, 399]])
def test_null_in_a_row_with_a_learning_rate_is_nan(tmp_path, bad):
    rows = [{"step": s, "loss": None if s in bad else 3.0, "lr": 1e-3} for s in range(400)]
    loss = read_log(jsonl(tmp_path / "log.jsonl", rows)).metrics["loss"]
    assert loss.index[np.isinf(loss)].tolist() == [*bad]


def test_a_trainer_state_that_is_cut_off_keeps_its_steps(tmp_path):
    history = json.dumps({"log_history": [{"loss": 3.0 - s / 100, "step": s} for s in STEPS]}, indent=1)
    (tmp_path / "trainer_state.json").write_text(history[: len(history) // 2])
    loss = read_log(tmp_path / "trainer_state.json").metrics["loss"]
    assert loss.index[0] == 1 and all(value == 3.0 - step / 100 for step, value in loss.items())


def test_of_several_runs_one_is_read_and_named(tmp_path):
    lines = [
        "Step,sun-1 - train/loss,sky-2 - train/loss,sky-2 - train/loss__MAX",
        *(f"{i},1,2,{2 + i % 2}" for i in range(9)),
    ]
    (tmp_path / "two.csv").write_text("\n".join(lines))
    first, second = read_log(tmp_path / "two.csv"), read_log(Path(f"{tmp_path}/two.csv:sky-2"))
    assert set(first.metrics["loss"]) == {1.0} and "sun-1 is read" in first.notes[0] and "sky-2" in first.notes[0]
    assert set(second.metrics["loss"]) == {2.0} and "averages" in second.notes[0]
    with pytest.raises(UserError, match="has no run 'sea-3'"):
        read_log(Path(f"{tmp_path}/two.csv:sea-3"))


def test_without_a_loss_the_error_lists_the_columns_and_the_way_out(tmp_path):
    path = jsonl(tmp_path / "log.jsonl", [{"step": s, "train/objective": 1.0, "acc": 0.5} for s in range(5)])
    with pytest.raises(UserError, match=r"train/objective, acc.*--map loss=") as error:
        read_log(path)
    assert str(path) in str(error.value)
    log = read_log(path, {"loss": "train/objective"})
    assert log.columns == {"train/objective": "loss"} and log.unused == ["acc"]
    with pytest.raises(UserError, match="no column 'nll'"):
        read_log(path, {"loss": "nll"})
    for name in ("perplexity", "ppl", "val_loss"):  # a perplexity is not in nats
        with pytest.raises(UserError, match=name) as error:
            read_log(jsonl(tmp_path / "log.jsonl", [{"step": s, "lr": 0.1, name: 9.0} for s in range(5)]))
        assert ("--map" in str(error.value)) == ("--map loss=val_loss" in str(error.value)) == (name == "val_loss")


@pytest.mark.parametrize(
    "content", [b"\x80\x04\x95pickle\x00", b"", b"hello\n", b"{}", b"[]", b"[1, 2]", b"step,loss\n"]
)
def test_no_log_is_a_user_error(tmp_path, content):
    (tmp_path / "x.log").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.log"):
        read_log(tmp_path / "x.log")


def test_names():
    known = {
        "loss_metrics/global_avg_loss": "loss", "Train loss/train/total": "loss",
        "metrics/train/LanguageCrossEntropy": "loss", "loss/train": "loss", "validation_loss": "val_loss",
        "vision_loss": "loss/image", "grad_2.0_norm_total": "grad_norm",
        "l2_norm/grad/global": "grad_norm", "grad/norm/total": "grad_norm", "optim/LR (group 0)": "lr",
        "lr-DecoupledAdamW/group0": "lr", "attention_entropy/layer_3": "attn_entropy/layer03",
        "model.language_model.layers.11.q_norm": "q_norm/text/layer11",
        "grad_norm/model.layers.3.mlp.down_proj.weight": "grad_norm/model.layers.3.mlp.down_proj.weight",
        "grad/transformer.blocks.0.att_proj.weight.norm": "grad_norm/transformer.blocks.0.att_proj.weight",
        "params/norm/layers/3/attn/q_proj/weight": "w_q_norm/layer03",
        "attn_logit_absmax/text-image/layer03/head01": "attn_logit_absmax/text-image/layer03/head01",
    }  # fmt: skip
    assert {name: tag_of(name) for name in known} == known
    other = ("load_balancing_loss", "loss scale", "train/Z loss", "global_max_loss", "eval/books/CE loss", "perplexity")
    assert [name for name in other if tag_of(name)] == []
    assert step_of(("loss", "_step", "train/global_step", "consumed samples")) == "train/global_step"
    assert step_of(("loss", "total steps", "Eval batch")) is None
