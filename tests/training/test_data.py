"""A run records its excess loss over a known source, and the statistics of its data in data.json."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from mmqk.data.loader import MicroBatches
from mmqk.store import read_metrics
from mmqk.train import main
from mmqk.training.losses import modality_losses, modality_means, modality_sums
from tests.tiny import data_of

DIAL = ['--data.mix={"dial": 1}', "--data.seq_len=96"]


@pytest.fixture(scope="module")
def dialled(tiny_args, tmp_path_factory):
    out = tmp_path_factory.mktemp("dial") / "run"
    assert main([*tiny_args, *DIAL, f"--out={out}"]) == 0
    return out


def test_excess_is_the_loss_less_what_the_source_knows(dialled, tiny_args):
    lines = {line["step"]: line for line in read_metrics(dialled / "metrics.jsonl")}
    data = data_of([*tiny_args, *DIAL])
    # The negative log probability that the synthetic source `dial` gives each token of the first batch.
    ids = np.stack([data.order.row(i).ids for i in range(4)])
    nats = -data.dial.log_prob(ids)[:, 1:]
    text, record = ids[:, 1:] < 128, json.loads((dialled / "data.json").read_text())
    for name, mine in (("text", text), ("image", ~text)):
        expected = lines[1][f"loss/{name}"] - nats[mine].mean()
        assert lines[1][f"excess/{name}"] == pytest.approx(expected, abs=1e-5)
        assert lines[12][f"val_excess/{name}"] < lines[12][f"val_loss/{name}"]
        floor = record[name]["floor"]
        assert lines[12][f"val_loss/{name}"] - lines[12][f"val_excess/{name}"] == pytest.approx(floor, abs=1e-5)
        assert record[name]["targets"] == data.targets(12 * 4)[name]


@pytest.mark.parametrize("noise", [{}, {"image": 0.5}])
def test_a_model_that_knows_the_source_has_no_excess(tiny_args, noise):
    data = data_of([*tiny_args, *DIAL, f"--data.dial.target_noise={json.dumps(noise)}"])
    batch = data.order.builder.batch([data.order.row(i) for i in range(4)])
    p_BT = torch.exp(-batch.target_surprise_BT)
    image = batch.target_mask_BT & (batch.target_modality_BT == 1)
    differ = batch.targets_BT != batch.ids_BT.roll(-1, dims=1)
    assert differ[image].float().mean().item() == pytest.approx(noise.get("image", 0.0), abs=0.2)
    assert not differ[batch.target_mask_BT & ~image].any()

    def excess(p_BT):
        """Return the excess loss of a model that gives probability p to the target and shares the rest equally among
        the other ids."""
        logits = torch.log((1 - p_BT[..., None]) / 255).expand(-1, -1, 256).clone()
        logits.scatter_(-1, batch.targets_BT[..., None], torch.log(p_BT)[..., None])
        sums = modality_losses(logits, batch.targets_BT, batch.target_modality_BT, batch.target_mask_BT, 2)
        means = modality_means(modality_sums(sums, batch).tolist(), ("text", "image"))
        return [means["excess/text"], means["excess/image"]]

    assert excess(p_BT) == pytest.approx([0, 0], abs=1e-5)
    assert min(excess(p_BT / 2)) == pytest.approx(np.log(2), abs=1e-5)


def test_targets_are_those_of_the_batches_that_the_run_trains_on(tiny_args):
    steps = 150  # more sequences than `SAMPLE` of datamodule.py
    data = data_of(tiny_args)
    size = data.config.batch_size
    batches = MicroBatches(data.order, size, accumulate=2, rank=0, world=1, steps=steps)
    counts_M = torch.zeros(2)
    for batch in (batches[i] for i in range(len(batches))):
        modality_BT = batch.ids_BT.roll(-1, 1) >= 305
        counts_M += torch.stack([(batch.target_mask_BT & (modality_BT == m)).sum() for m in (False, True)])
    found = data.targets(steps * size)
    assert found == pytest.approx(dict(zip(("text", "image"), (counts_M / steps / 4).tolist(), strict=True)), rel=1e-6)
    # The control: a different number of sequences has a different mean number of targets.
    assert data.targets(1)["text"] != pytest.approx(found["text"], rel=1e-6)


def test_three_modalities_train_and_are_monitored(tiny_args, tmp_path):
    names = ("text", "image", "audio")
    three = {"vocabulary": 16, "skew": 0.5, "entropy": 1.2, "tokens": 20, "lag": 2}
    fields = [f"--data.dial.{field}={json.dumps(dict.fromkeys(names, value))}" for field, value in three.items()]
    assert main([*tiny_args, *DIAL, "--data.seq_len=60", *fields, f"--out={tmp_path / 'run'}"]) == 0
    last = list(read_metrics(tmp_path / "run/metrics.jsonl"))[-1]
    assert {f"val_excess/{name}" for name in names} <= set(last)
    pairs = {f"attn_logit_absmax/{a}-{b}/layer00" for a in names for b in names}
    assert pairs <= set(last)
