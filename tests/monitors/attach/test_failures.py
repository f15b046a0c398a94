"""Tests that a probe that fails is a line and a skipped probe, and that strict=True raises its error."""

from __future__ import annotations

import json
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmqk.monitors import attach
from mmqk.store import read_metrics
from tests.monitors.attach.nets import D, H, Net, batches
from tests.monitors.attach.test_sides import summary
from tests.monitors.attach.test_watch import train

IMAGE = {"image": range(10, 40)}


class Fails(Net):
    """Its forward in evaluation mode fails after the training steps in ``reasons``."""

    def __init__(self, reasons: dict[int, Exception]):
        super().__init__(dropout=0.1)
        self.reasons, self.trained = reasons, 0

    def forward(self, ids, mask=None):
        out = super().forward(ids, mask)
        self.trained += self.training
        if not self.training and self.trained in self.reasons:
            raise self.reasons[self.trained]
        return out


def test_training_goes_on_and_later_probes_are_written(tmp_path, capsys):
    again = ValueError("no such layer")
    model = Fails({2: again, 4: again, 6: torch.OutOfMemoryError("no memory")})
    watch = attach(model, modality=IMAGE, every_n_steps=2, out=tmp_path)
    twin = Fails({})
    weights, plain = train(model, model, 8, watch), train(twin, twin, 8)
    assert all(torch.equal(x, plain[name]) for name, x in weights.items()) and model.training
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [8]
    printed = capsys.readouterr().out
    assert printed.count("no probe at step") == 2 and "no probe at step 4" not in printed
    assert "mmqk: no probe at step 2, training goes on: the probe's forward of Fails" in printed
    assert "ValueError: no such layer" in printed and "no probe at step 6" in printed and "no memory" in printed
    assert "attention measured in 3 of 3 layers" in printed  # the line of the first probe that succeeds


def test_a_full_disk_does_not_end_the_training(tmp_path, capsys, monkeypatch):
    model, logged = Net(), []
    watch = attach(model, modality=IMAGE, every_n_steps=2, out=tmp_path, log=lambda values, step: logged.append(step))
    train(model, model, 2, watch)
    monkeypatch.setattr(os, "fsync", lambda file: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
    train(model, model, 4, watch)
    monkeypatch.undo()
    train(model, model, 2, watch)
    watch.close()
    assert {2, 8} <= {line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")} and logged == [2, 4, 6, 8]
    assert json.loads((tmp_path / "status.json").read_text()) == {"status": "completed", "step": 8}
    assert capsys.readouterr().out.count("numbers of step 4 are not written") == 1


def test_strict_raises_the_error():
    model = Fails({2: ValueError("no such layer")})
    watch = attach(model, modality=IMAGE, every_n_steps=2, strict=True)
    with pytest.raises(RuntimeError, match=r"\(ValueError: no such layer\)") as raised:
        train(model, model, 8, watch)
    assert isinstance(raised.value.__cause__, ValueError)


class Bank(nn.Module):
    """Attention over the sequence, or over a bank of keys that no input leads to."""

    def __init__(self, untraced: bool):
        super().__init__()
        self.untraced, self.qkv = untraced, nn.Linear(D, 3 * D)
        self.bank = torch.randn(1, H, 16, D // H)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.untraced:
            bank = self.bank.expand(len(x), -1, -1, -1)
            y = y + F.scaled_dot_product_attention(q, bank, bank)
        return y.transpose(1, 2).flatten(2)


def test_keys_that_cannot_be_traced_count_as_hidden():
    model, (ids,) = Net(["sdpa"] * 3), batches(1)
    for n in (1, 2):
        model.layers[n].attention = Bank(n == 2)
    logged = []
    watch = attach(model, modality=IMAGE, every_n_steps=1, log=lambda values, step: logged.append(values))
    model(ids)
    watch.step()
    assert watch.layers.hidden == ["layers.2.attention"] and watch.layers.total == 3
    assert (logged[0]["attn_layers_seen"], logged[0]["attn_layers_hidden"]) == (2, 1)
    assert "cannot be traced to an input of the model): layers.2.attention" in summary(watch)
