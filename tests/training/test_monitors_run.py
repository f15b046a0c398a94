"""Train runs with every monitor on: they change no weight, resume inside a window, and report the site of a NaN."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmqk.store import cli_main
from mmqk.train import main
from tests.training.runs import rewind, same, same_run, saved, series, state, status
from tests.training.toy import apart, fit, module_of, toy_batch, weights

# The checkpoints of steps 4 and 8 are inside windows of the radial budget; the last window is cut short.
EVERYTHING = [
    "--monitor.heads=true", "--monitor.parameters=true", "--monitor.precision=true", "--monitor.second_moment=true",
    "--monitor.gradient_agreement=true", "--monitor.sharpness=true", "--monitor.budget_every_n_steps=5",
    "--monitor.budget_steps=5",
]  # fmt: skip
RUN = ["--model.residual_dropout=0.1", "--model.attn_dropout=0.1", "--trainer.accumulate_grad_batches=2",
       "--monitor.probe_sequences=2", "--checkpoint.keep=9"]  # fmt: skip


@pytest.fixture(scope="module")
def on(tiny_args, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("on") / "run"
    assert main([*tiny_args, *RUN, *EVERYTHING, f"--out={out}"]) == 0
    return out


def test_every_monitor_leaves_every_bit_of_the_weights(on, tiny_args, tmp_path):
    off = tmp_path / "off"
    assert main([*tiny_args, *RUN, f"--out={off}"]) == 0
    assert same(state(off), state(on))
    pairs = zip(series(off), series(on), strict=True)
    assert all(plain.items() <= line.items() for plain, line in pairs)
    assert not same(state(on, 4), state(on))  # the control: different weights are detected


@pytest.mark.parametrize(("precision", "least"), [("bf16-true", 0.5), ("32-true", 0.0)])
def test_the_share_of_weights_that_an_update_left_unchanged(tiny_args, tmp_path, capsys, precision, least):
    """Compare with the checkpoints before and after the update. A run in bf16 says that most weights stay."""
    args = [*tiny_args, f"--trainer.precision={precision}", "--optim.lr=1e-4", "--checkpoint.every_n_steps=1",
            "--trainer.max_steps=8", "--backend=math"]  # fmt: skip
    # The fused kernel in bf16 needs avx512 on a CPU with AMX, so it refuses ATEN_CPU_CAPABILITY=default there.
    args += [] if precision == "bf16-true" else ["--monitor.parameters=true"]
    assert main([*args, f"--out={tmp_path / 'run'}"]) == 0
    assert ("bf16-true is an experiment" in capsys.readouterr().err) is (precision == "bf16-true")
    before, after = (saved(tmp_path / "run", step)["state_dict"] for step in (7, 8))
    assert before["model.embed.weight"].dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    equal = sum(int((before[name] == after[name]).sum()) for name in before)
    share = equal / sum(weight.numel() for weight in before.values())
    lines = series(tmp_path / "run")
    logged = {line["step"]: line["update_unchanged"] for line in lines if "update_unchanged" in line}
    assert list(logged) == [4, 8] and logged[8] == pytest.approx(share, rel=1e-6)
    assert least <= share < (1.0 if least else 0.05)


def test_a_resume_in_the_middle_of_a_window_is_the_straight_run(on, tmp_path):
    args = rewind(on, tmp_path / "again", 8)
    assert main([*args, f"--out={tmp_path / 'again'}"]) == 0
    assert same_run(tmp_path / "again", on)


def test_a_run_that_breaks_says_where(tiny_args, tmp_path, capsys):
    """A learning rate of 3e18 gives finite weights whose logits overflow."""
    too_far = ["--optim.lr=3e18", "--optim.warmup_steps=0", "--trainer.gradient_clip_val=0"]
    args = [*tiny_args, *EVERYTHING, *too_far]
    assert cli_main(main)([*args, f"--out={tmp_path / 'run'}"]) == 3
    found = status(tmp_path / "run")
    assert found["status"] == "diverged" and found["step"] == 2
    site = "attn_logits of layer 0, at text and image tokens, is"
    assert found["reason"].startswith(f"the gradient norm became nan: {site}")
    assert found["reason"] in capsys.readouterr().err
    steps = [line["step"] for line in series(tmp_path / "run")]
    assert steps[:3] == [0, 1, 2] and 3 not in steps  # the run ends at step 2
    assert main([*args, f"--out={tmp_path / 'run'}"]) == 0  # a diverged run is finished


def broken_at(step: int, **optim):
    """Return a module whose gradient is NaN in one step, although the forward pass of the step is finite."""
    module = module_of(**optim)

    def plant(gradient):
        return gradient * float("nan") if module.trainer.global_step == step else gradient

    module.model.blocks[1].mlp.w_up.weight.register_hook(plant)
    return module


CHANGES = [{}, {"split_second_moment": True}, {"qk_clip": 1e-3}, {"msign_every": 4}]


@pytest.mark.parametrize("optim", CHANGES, ids=str)
def test_after_a_step_that_is_not_finite_the_weights_stay(optim):
    batches = [toy_batch(i) for i in range(5)]
    broken, before = broken_at(2, **optim), module_of(**optim)
    lines = fit(broken, batches, clip=1.0)
    fit(before, batches[:2], clip=1.0)
    # The control: without the NaN the run trains all five steps, and its weights differ from those after two steps.
    whole = module_of(**optim)
    fit(whole, batches, clip=1.0)
    assert [line["grad_norm"] == line["grad_norm"] for line in lines] == [True, True, False, True, True]
    assert apart(weights(broken), weights(before)) == 0 < apart(weights(broken), weights(whole))
    with torch.random.fork_rng():
        said = broken.bad_site([(2, batches[2])])
    assert said is None  # the NaN is planted at step 2 only, and the trainer is at a later step
