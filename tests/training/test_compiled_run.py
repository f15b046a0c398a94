"""Train runs with compiled blocks, or with blocks recomputed in the backward pass, and compare the run folders.

The backend aot_eager traces the code and its backward pass but skips the code generator, which takes minutes.
Compiled code therefore runs torch's own kernels, and an eager run is the reference.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import _dynamo as dynamo
from torch._functorch import config as functorch_config

from mmqk.model import transformer
from mmqk.train import main
from mmqk.training import losses as chunked_loss
from tests.training import runs
from tests.training.runs import rewind, series, state

pytestmark = pytest.mark.slow

COMPILED, RECOMPUTED = "--compile=true", "--activation_checkpointing=true"


@pytest.fixture(autouse=True)
def traced(monkeypatch) -> list[str]:
    """Yield a list to which `torch.compile` adds the name of each compiled function."""
    plain, names = torch.compile, []

    def compile_(function, **options):
        names.append(function.__qualname__)
        return plain(function, **{**options, "backend": "aot_eager"})

    monkeypatch.setattr(torch, "compile", compile_)
    chunked_loss._compiled.cache_clear()
    torch.compiler.reset()
    with dynamo.config.patch(recompile_limit=8), functorch_config.patch(donated_buffer=True):
        yield names
    chunked_loss._compiled.cache_clear()


def trained(out: Path, args: list[str], *flags: str) -> Path:
    assert main([*args, "--checkpoint.keep=9", *flags, f"--out={out}"]) == 0
    return out


def same(a: Path, b: Path) -> bool:
    return runs.same(state(a), state(b))


def near(a: Path, b: Path) -> float:
    one, two = state(a), state(b)
    assert one.keys() == two.keys()  # the names of the weights are equal too
    return max(float((one[k].float() - two[k].float()).abs().max()) for k in one)


DROPOUT = "--model.residual_dropout=0.1"


def test_a_compiled_run_is_the_eager_one_resumes_exactly_and_its_forks_go_on(tiny_args, tmp_path, traced):
    compiled, eager = tmp_path / "compiled", trained(tmp_path / "eager", tiny_args, DROPOUT)
    trained(compiled, tiny_args, COMPILED, DROPOUT)
    assert traced == ["Block.compute", "Module._call_impl", "modality_losses"]
    assert near(compiled, eager) < 1e-6
    for ours, theirs in zip(series(compiled), series(eager), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    torch.compiler.reset()
    assert main([*rewind(compiled, tmp_path / "again", 8), f"--out={tmp_path / 'again'}"]) == 0
    assert series(tmp_path / "again") == series(compiled) and same(tmp_path / "again", compiled)
    # A fork is compiled too, unless a flag says otherwise.
    parent = f"--fork={compiled / 'checkpoints/step00000008.ckpt'}"
    for name, flags in (("same", []), ("plain", ["--compile=false", RECOMPUTED])):
        traced.clear()
        assert main([parent, "--quiet", *flags, f"--out={tmp_path / name}"]) == 0
        assert ("Block.compute" in traced) == (name == "same") and near(tmp_path / name, compiled) < 1e-6
    assert same(tmp_path / "same", compiled)
    changed = [json.loads((tmp_path / name / "fork.json").read_text())["changed"] for name in ("same", "plain")]
    assert changed == [[], [{"field": "compile", "from": True, "to": False}]]


def test_probes_change_no_bit_and_see_a_compiled_model_as_an_eager_one(tiny_args, tmp_path):
    flags = [COMPILED, "--monitor.probe_split=current", "--monitor.gradient_agreement=true",
             "--monitor.precision=true", "--monitor.every_n_steps=2"]  # fmt: skip
    on, off, eager = (tmp_path / name for name in ("on", "off", "eager"))
    trained(on, tiny_args, *flags)
    trained(off, tiny_args, COMPILED, "--monitor.every_n_steps=0")
    trained(eager, tiny_args, *flags[1:])
    assert same(on, off)
    ours, theirs = ({line["step"]: line for line in series(run)} for run in (on, eager))
    assert "attn_logit_absmax/text-image/layer01" in ours[2] and "grad_noise/text" in ours[2]
    for step in range(13):
        assert ours[step] == pytest.approx(theirs[step], rel=1e-4, abs=1e-5)
    assert near(on, eager) < 1e-5


RUNS = {
    "dropout": [DROPOUT, "--model.attn_dropout=0.1"],
    "split moments, loss in chunks": [
        "--optim.split_second_moment=true", "--loss.chunk_size=50", "--loss.z_loss=1e-3"],
    "budget and agreement": [
        "--monitor.probe_split=current", "--monitor.probe_sequences=2", "--monitor.gradient_agreement=true",
        "--monitor.parameters=true", "--monitor.budget_every_n_steps=4", "--monitor.budget_steps=3"],
}  # fmt: skip


@pytest.mark.parametrize("flags", RUNS.values(), ids=RUNS)
def test_recomputed_it_is_the_same_run_bit_for_bit(tiny_args, tmp_path, flags):
    again = []
    checkpoint = transformer.checkpoint
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer, "checkpoint", lambda *a, **k: again.append(k) or checkpoint(*a, **k))
        for name, recompute in (("once", []), ("again", [RECOMPUTED])):
            assert not again
            trained(tmp_path / name, tiny_args, *flags, *recompute, "--trainer.accumulate_grad_batches=2")
    assert same(tmp_path / "once", tmp_path / "again") and series(tmp_path / "once") == series(tmp_path / "again")
    assert len(again) >= 2 * 2 * 12 and {k["preserve_rng_state"] for k in again} == {"dropout" in flags[0]}


SEVERAL = {"split moments, loss in chunks": [COMPILED, RECOMPUTED], "budget and agreement": [COMPILED]}


@pytest.mark.parametrize(("name", "flags"), SEVERAL.items(), ids=SEVERAL)
def test_several_backward_passes_go_through_one_compiled_forward(tiny_args, tmp_path, name, flags):
    one, two = (trained(tmp_path / str(len(own)), tiny_args, *RUNS[name], *own) for own in (flags, []))
    assert near(one, two) < 1e-5 and [line.keys() for line in series(one)] == [line.keys() for line in series(two)]
