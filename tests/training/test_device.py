"""The device of a run is resolved before the run folder is created; it is recorded, or refused in one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmqk.config import RunConfig, resolve
from mmqk.model import EarlyFusionTransformer
from mmqk.store import UserError, cli_main
from mmqk.train import main
from mmqk.training.fork.start import changes
from mmqk.training.ranks import advised, describe, resolve_device

CPU = torch.device("cpu")
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def run(tiny_args) -> RunConfig:
    return resolve([*tiny_args, "--data.seq_len=128"])


def of(run: RunConfig, backend: str = "sdpa", **model) -> RunConfig:
    return replace(run, backend=backend, model=replace(run.model, **model))


# The resolved device ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "model", "kernel"),
    [
        ("math", {}, "math (dense, fp32)"),
        ("sdpa", {}, "flash (SDPA)"),
        ("sdpa", {"window": 3}, "flash (SDPA)"),
        ("sdpa", {"attn_dropout": 0.1}, "math (SDPA)"),
        ("sdpa_flash", {}, "flash (SDPA)"),
    ],
)
def test_the_kernel_is_named(run, backend, model, kernel):
    settled = resolve_device(of(run, backend, **model), CPU)
    assert settled == {"name": "cpu", "attention": kernel, "compiled": False, "recomputed": False}
    assert describe(settled) == f"cpu; attention: {kernel}"


def test_the_kernel_that_is_named_is_the_one_that_runs(run):
    """The profiler records the operation that torch calls."""
    names = {"flash": "_scaled_dot_product_flash_attention_for_cpu", "math": "_scaled_dot_product_attention_math"}
    for model in ({}, {"attn_dropout": 0.1}):
        chosen = of(run, "sdpa", **model)
        own = EarlyFusionTransformer(chosen.model, "sdpa")
        with torch.profiler.profile() as seen:
            own(torch.zeros(1, 128, dtype=torch.long))
        called = {event.key.removeprefix("aten::") for event in seen.key_averages()}
        kernel = resolve_device(chosen, CPU)["attention"].split()[0]
        assert {word for word, name in names.items() if name in called} == {kernel}


# What is refused -------------------------------------------------------------------------------------------


def test_a_configuration_for_a_gpu_is_refused_without_one(tiny_data, tmp_path, capsys, monkeypatch):
    """Such a configuration would compile on the CPU for minutes, so the user must select the CPU or switch off
    compile."""
    from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator

    for kind in (CUDAAccelerator, MPSAccelerator):
        monkeypatch.setattr(kind, "is_available", staticmethod(lambda: False))
    own = [f"--data.{k}={tiny_data / k}" for k in ("pairs", "text", "tokenizers", "cache")]
    args = [f"--config={CONFIGS / 'gpu_25m.yaml'}", *own, f"--out={tmp_path / 'run'}", "--data.val_sequences=8"]
    assert cli_main(main)(args) == 2
    said = capsys.readouterr()
    assert said.err.startswith("mmqk: There is no GPU here") and len(said.err.strip().splitlines()) == 1
    assert "--compile false" in said.err and list(tmp_path.iterdir()) == []
    # The controls: each option that the message names is accepted.
    for flag in ("--compile=false", "--trainer.accelerator=cpu"):
        assert (
            resolve_device(resolve([*args, flag, "--data.batch_size=8", "--model.n_layers=1"]), CPU)["name"] == "cpu"
        )


REFUSED = {
    "efficient": (["--backend=sdpa_efficient"], "needs a CUDA GPU"),
    "compile, QK-Clip": (["--compile=true", "--optim.qk_clip=1"], "optim.qk_clip reads queries and keys"),
    "flex, length": (["--backend=flex", "--data.seq_len=96"], "data.seq_len to be a multiple of 128, but it is 96"),
    "flash, window": (["--backend=sdpa_flash", "--model.window=4"], "sdpa_flash cannot apply model.window"),
    "a cap": (["--model.attn_softcap=5"], "backend sdpa cannot apply model.attn_softcap"),
}


@pytest.mark.parametrize(("flags", "sentence"), REFUSED.values(), ids=REFUSED)
def test_a_refused_run_is_one_sentence_and_no_folder(tiny_args, tmp_path, capsys, flags, sentence):
    assert cli_main(main)([*tiny_args, *flags, f"--out={tmp_path / 'run'}"]) == 2
    said = capsys.readouterr()
    assert sentence in said.err and len(said.err.strip().splitlines()) == 1 and not said.out
    assert list(tmp_path.iterdir()) == []


# What is recorded ------------------------------------------------------------------------------------------


def test_a_run_records_and_says_its_device(tiny_args, tmp_path, capsys):
    args = [a for a in tiny_args if a != "--quiet"]
    assert main([*args, "--activation_checkpointing=true", "--trainer.max_steps=1", f"--out={tmp_path / 'run'}"]) == 0
    assert "cpu; attention: flash (SDPA); blocks recomputed" in capsys.readouterr().out
    details = json.loads((tmp_path / "run/run.json").read_text())["details"]
    assert details["device"] == {
        "name": "cpu", "attention": "flash (SDPA)", "compiled": False, "recomputed": True}  # fmt: skip
    assert details["config"]["compile"] is False and details["config"]["activation_checkpointing"] is True


def test_compile_is_of_the_identity_where_it_is_on_and_recompute_never(tiny_args):
    plain, compiled, off, recomputed = (
        resolve([*tiny_args, *flags])
        for flags in ([], ["--compile=true"], ["--compile=false"], ["--activation_checkpointing=true"])
    )
    assert plain.identity == off.identity == recomputed.identity and plain.id == recomputed.id
    assert compiled.identity == {**plain.identity, "compile": True} and compiled.id != plain.id


def test_the_demonstration_is_the_run_that_it_was():
    demo = [f"--config={CONFIGS / 'demo.yaml'}"]
    assert resolve(demo).id == "249a79196a" != resolve([*demo, "--seed=1"]).id


def test_what_a_fork_changes():
    """The configuration of an older parent lacks the fields that later versions added."""
    old = {"seed": 0}
    new = {"seed": 0, "compile": False, "activation_checkpointing": False}
    assert (
        changes(old, new)
        == changes(old, {**new, "activation_checkpointing": True})
        == changes({**new, "activation_checkpointing": True}, new)
        == []
    )
    assert changes(old, {**new, "compile": True}) == [{"field": "compile", "from": False, "to": True}]
    assert changes({**new, "compile": True}, new) == [{"field": "compile", "from": True, "to": False}]
    old, new = {"alarm": {"stop": []}}, {"compile": False, "alarm": {"stop": [], "stop_diverged": True}}
    assert changes(old, new) == []
    new["alarm"]["stop_diverged"] = False
    assert changes(old, new) == [{"field": "alarm.stop_diverged", "from": True, "to": False}]


def test_torchs_error_gets_the_fields_to_change():
    allocation = RuntimeError("[enforce fail] can't allocate memory: you tried to allocate 9 bytes.")
    for error, words in [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), "lower data.batch_size"),
        (allocation, "lower data.batch_size"),
        (RuntimeError("No available kernel. Aborting execution."), "use backend sdpa or math"),
    ]:
        said = advised(error)
        assert isinstance(said, UserError) and words in str(said) and str(said).startswith(str(error)[:20])
    other = RuntimeError("shapes differ")
    assert advised(other) is other
