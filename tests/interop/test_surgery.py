"""A changed architecture stays near the original: nearer than with gains of 1, and near the best gains."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from mmqk.checkpoint import load_model
from mmqk.config import resolve
from mmqk.interop import from_transformers
from mmqk.interop.folders import main, write_run
from mmqk.interop.surgery import batch_for, operate
from mmqk.model import EarlyFusionTransformer
from mmqk.store import cli_main
from mmqk.train import main as train
from mmqk.training.fork.measure import change_of_function
from mmqk.training.fork.weights import carry
from tests.interop.models import LLAMA, logits_of, tiny


def llama():
    """Return a Llama whose queries and keys have channels of different sizes, and RMS below 1."""
    hf_model = tiny(LLAMA, torch.float32, head_dim=32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in hf_model.model.layers:
            for matrix in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                matrix.weight.view(-1, 32, 64).mul_(0.1 + 1.4 * torch.rand(32, 1, generator=generator))
    return hf_model


@pytest.fixture
def ids(tmp_path) -> Path:
    """Write ids of sequences in which some tokens are frequent, as in text."""
    generator = torch.Generator().manual_seed(1)
    odds = 1 / torch.arange(1, 97).float()
    drawn = torch.multinomial(odds.expand(12, -1), 40, replacement=True, generator=generator)
    np.save(tmp_path / "ids.npy", drawn.numpy())
    return tmp_path / "ids.npy"


def distance(old, new, batch) -> float:
    return change_of_function(old, new, batch).logits


def gains_of(model) -> list[torch.nn.Parameter]:
    return [p for name, p in model.named_parameters() if "q_norm" in name or "k_norm" in name]


def bound(old, new, batch) -> float:
    """Return the distance after gradient descent on all gains at once, which minimizes the logits' difference."""
    wanted = old(batch.ids_BT).detach()
    gains = gains_of(new)
    best, optimizer = float("inf"), torch.optim.Adam(gains, lr=0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    for _ in range(40):
        error = (new(batch.ids_BT) - wanted).square().sum() / wanted.square().sum()
        best = min(best, float(error.detach()) ** 0.5)
        optimizer.zero_grad()
        error.backward(inputs=gains)
        optimizer.step()
        schedule.step()
    return best


@pytest.mark.parametrize("gain", ["shared", "per_head"])
def test_fitted_gains_are_far_better_than_1_and_near_the_bound(gain, ids):
    old = from_transformers(llama())
    fields = {"qk_norm.kind": "rms", "qk_norm.gain": gain}
    batch, _ = batch_for(old.config, ids, ids)
    new, carried, change = operate(old, fields, batch)
    assert len(carried.added) == 6
    ones = EarlyFusionTransformer(new.config, "math").eval()
    ones.load_state_dict(new.state_dict())
    with torch.no_grad():
        for p in gains_of(ones):
            p.fill_(1.0)
    with_1 = distance(old, ones, batch)
    with_rms = EarlyFusionTransformer(new.config, "math").eval()
    carry(old, with_rms, batch)
    assert change.logits < distance(old, with_rms, batch)  # the fit improves on the gains of a fork
    best = bound(old, new, batch)
    assert best <= change.logits < min(0.25 * with_1, 1.3 * best)


def test_gate_starts_without_an_effect_and_a_sink_with_a_small_share(ids):
    old = from_transformers(llama())
    batch, _ = batch_for(old.config, ids, ids)
    for gate in ("head", "element"):
        assert operate(old, {"attn_gate": gate}, batch)[2].logits < 1e-5
    new, _, change = operate(old, {"attn_sink": True}, batch)
    assert 1e-4 < change.logits < 0.1
    shares: list[torch.Tensor] = []
    q: dict[int, torch.Tensor] = {}

    def observer(site: str, layer: int, x_BHTK: torch.Tensor) -> None:
        if site == "q":
            q[layer] = x_BHTK
        elif site == "k":
            z_BHTS = old.config.attn_scale_value * q[layer] @ x_BHTK.mT
            z_BHTS = z_BHTS.masked_fill(torch.ones(z_BHTS.shape[-2:]).triu(1).bool(), -torch.inf)
            sink_H = new.get_parameter(f"blocks.{layer}.attention.sink.weight")
            shares.append((sink_H[:, None] - z_BHTS.logsumexp(-1)).exp())

    old(batch.ids_BT, observer=observer)
    assert float(torch.stack(shares).detach().log().mean().exp()) == pytest.approx(0.01, rel=0.01)
    with torch.no_grad():  # the control: a sink at its initial value in a new model
        for layer in range(3):
            new.get_parameter(f"blocks.{layer}.attention.sink.weight").zero_()
    assert distance(old, new, batch) > 2 * change.logits


def test_entry_norm_keeps_the_rms_of_embeddings(ids):
    old = from_transformers(llama())
    batch, _ = batch_for(old.config, ids, ids)
    new, _, change = operate(old, {"embed_norm": True}, batch)
    rms = old.embed(batch.ids_BT).detach().square().mean().sqrt()
    assert new.config.embed_scale == {"text": pytest.approx(float(rms), rel=1e-3)}
    _, _, unscaled = operate(old, {"embed_norm": True, "embed_scale": {}}, batch)
    assert change.logits < 0.6 * unscaled.logits


def command(*words: str) -> int:
    return cli_main(main)([str(word) for word in words])


def test_command_writes_a_class_that_holds_the_model(ids, tmp_path, capsys):
    import transformers

    llama().save_pretrained(tmp_path / "llama")
    args = ["--from", tmp_path / "llama", "--batch", ids, "--set", "model.qk_norm.kind=rms"]
    assert command(*args, "--set=model.qk_norm.eps=1e-6", "--to", tmp_path / "qwen") == 0
    said = capsys.readouterr().out
    changed = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "qwen")
    tokens = torch.from_numpy(np.load(ids))
    with torch.no_grad():
        before, after = logits_of(llama(), tokens), logits_of(changed, tokens)
    shown = float(re.search(r"logits differ by (\S+) of their RMS", said)[1])
    assert shown == pytest.approx(float((after - before).norm() / before.norm()), rel=0.01)
    loss = torch.nn.functional.cross_entropy(after[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert f"-> {loss:.4f}" in said
    # No class has QK-Norm with one gain for each head.
    assert command(*args, "--set=model.qk_norm.gain=per_head", "--to", tmp_path / "own") == 0
    assert "a checkpoint of mmqk, because model.qk_norm" in capsys.readouterr().out
    assert load_model(tmp_path / "own").config.qk_norm.gain == "per_head"
    # The result is a source, too, and a run without data gives a warning.
    assert command("--from", tmp_path / "own", "--to", tmp_path / "back", "--set=model.qk_norm.kind=none") == 0
    assert "random ids" in capsys.readouterr().out
    assert (tmp_path / "back/config.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set=model.d_model=32"], "a fork cannot change it"),
        (["--set=model.patch=os:abort"], "would run code"),
        (["--set=model.qk_norm.kind=rms", "--batch=/nowhere.npy"], "cannot be read"),
    ],
)
def test_mistakes(words, said, tmp_path, capsys):
    llama().save_pretrained(tmp_path / "llama")
    assert command("--from", tmp_path / "llama", "--to", tmp_path / "out", *words) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_fork_of_an_import_trains_with_new_moments(tiny_args, tmp_path):
    """Its first update is that of a new run that has the weights of the import."""
    run = resolve([*tiny_args, f"--out={tmp_path / 'plain'}"])
    model = EarlyFusionTransformer(run.model, seed=99)
    write_run(model, tmp_path / "import")
    data = [word for word in tiny_args if not word.startswith("--model")]
    forked = [*data, f"--fork={tmp_path / 'import'}", "--quiet", "--checkpoint.at=[1]", f"--out={tmp_path / 'fork'}"]
    assert train(forked) == 0
    record = json.loads((tmp_path / "fork/fork.json").read_text())
    assert record["changed"] == [] and record["optimizer"] == "all moments start at zero"
    start = {name: w for name, w in model.named_parameters()}
    after = torch.load(tmp_path / "fork/checkpoints/step00000001.ckpt", weights_only=True)
    moments = after["optimizer_states"][0]["state"]
    assert {float(m["step"]) for m in moments.values()} == {1.0}
    moved = [(after["state_dict"][f"model.{name}"] - w).abs().max() for name, w in start.items()]
    assert 0 < max(moved) < 2 * run.optim.lr  # the control: another model's weights differ by more
    other = EarlyFusionTransformer(run.model, seed=98)
    assert (other.embed.weight - model.embed.weight).abs().max() > 2 * run.optim.lr
    assert train([*forked[:-1], "--model.qk_norm.kind=rms", f"--out={tmp_path / 'changed'}"]) == 0
    changed = json.loads((tmp_path / "changed/fork.json").read_text())
    assert [c["field"] for c in changed["changed"]] == ["model.qk_norm.kind"]
    assert cli_main(train)([*forked[:-1], "--fork_skip_batches=1", f"--out={tmp_path / 'skipped'}"]) == 2


def test_gains_are_fitted_on_held_out_sequences_of_a_run_on_the_dial(tiny_args, tmp_path, capsys):
    dial = ['--data.mix={"dial": 1}', "--data.seq_len=96", "--trainer.max_steps=1", "--checkpoint.at=[1]"]
    assert train([*tiny_args, *dial, f"--out={tmp_path / 'run'}"]) == 0
    assert command("--from", tmp_path / "run", "--to", tmp_path / "to", "--set=model.qk_norm.kind=rms") == 0
    assert "held-out sequences of the run" in capsys.readouterr().out
