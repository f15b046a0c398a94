"""What a run says of its data: the excess over a source that is known, and data.json."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from mmqk.config import resolve
from mmqk.data.module import TokenDataModule
from mmqk.store import read_metrics
from mmqk.train import main
from mmqk.training.loss import modality_losses
from mmqk.training.module import modality_means, modality_sums

DIAL = ['--data.mix={"dial": 1}', "--data.seq_len=96"]


@pytest.fixture(scope="module")
def dialled(tiny_args, tmp_path_factory):
    out = tmp_path_factory.mktemp("dial") / "run"
    assert main([*tiny_args, *DIAL, f"--out={out}"]) == 0
    return out


def test_excess_is_the_loss_less_what_the_source_knows(dialled, tiny_args):
    lines = {line["step"]: line for line in read_metrics(dialled / "metrics.jsonl")}
    data = TokenDataModule(resolve([*tiny_args, *DIAL]).data, 0)
    data.setup()
    # The first batch, its probabilities asked of the dial itself, position by position.
    ids = np.stack([data.order.row(i).ids for i in range(4)])
    nats = -data.dial.log_prob(ids)[:, 1:]
    text = ids[:, 1:] < 128
    for name, mine in (("text", text), ("image", ~text)):
        expected = lines[1][f"loss/{name}"] - nats[mine].mean()
        assert lines[1][f"excess/{name}"] == pytest.approx(expected, abs=1e-5)
        assert lines[12][f"val_excess/{name}"] < lines[12][f"val_loss/{name}"]
        floor = json.loads((dialled / "data.json").read_text())[name]["floor"]
        assert lines[12][f"val_loss/{name}"] - lines[12][f"val_excess/{name}"] == pytest.approx(
            floor, abs=1e-5
        )


def test_a_model_that_knows_the_source_has_no_excess(tiny_args):
    data = TokenDataModule(resolve([*tiny_args, *DIAL]).data, 0)
    data.setup()
    batch = data.order.builder.batch([data.order.row(i) for i in range(4)])
    p_BT = torch.exp(-batch.target_surprise_BT)

    def excess(p_BT):
        """Of a model that gives the target p and every other id the same share of the rest."""
        logits = torch.log((1 - p_BT[..., None]) / 255).expand(-1, -1, 256).clone()
        logits.scatter_(-1, batch.targets_BT[..., None], torch.log(p_BT)[..., None])
        sums = modality_losses(logits, batch.targets_BT, batch.target_modality_BT, batch.target_mask_BT, 2)
        means = modality_means(modality_sums(sums, batch).tolist(), ("text", "image"))
        return [means["excess/text"], means["excess/image"]]

    assert excess(p_BT) == pytest.approx([0, 0], abs=1e-5)
    assert min(excess(p_BT / 2)) == pytest.approx(np.log(2), abs=1e-5)


def test_real_data_have_statistics_and_no_floor(tiny_args, tmp_path):
    assert main([*tiny_args, f"--out={tmp_path / 'run'}"]) == 0
    record = json.loads((tmp_path / "run/data.json").read_text())
    data = TokenDataModule(resolve(tiny_args).data, 0)
    data.setup()
    seen = [t for row in data.sample() for t in row.ids[1:].tolist()]
    assert record["image"]["used"] == len({t for t in seen if t >= 305}) and record["image"]["block"] == 32
    assert record["image"]["share"] == pytest.approx(np.mean([t >= 305 for t in seen]))
    assert record["text"]["floor"] is None
    assert not any("excess" in name for line in read_metrics(tmp_path / "run/metrics.jsonl") for name in line)


def test_a_source_that_cannot_be_learnt_in_time_is_said_to_be_so(tiny_args, dialled, tmp_path, capsys):
    main([*tiny_args, *DIAL, f"--out={tmp_path / 'run'}"])
    assert "cannot be learnt in this run" in capsys.readouterr().err
    two = {"vocabulary": 2, "skew": 0, "entropy": 0.2}
    few = [f"--data.dial.{name}={json.dumps({'text': value, 'image': value})}" for name, value in two.items()]
    main([*tiny_args, *DIAL, *few, f"--out={tmp_path / 'easy'}"])
    assert "cannot be learnt" not in capsys.readouterr().err


def test_padding_of_packed_sequences_is_said(tiny_args, tmp_path, capsys):
    main([*tiny_args, "--data.pack=documents", "--data.seq_len=150", f"--out={tmp_path / 'run'}"])
    assert "of the packed sequences of kind pair is padding: raise data.seq_len" in capsys.readouterr().err
