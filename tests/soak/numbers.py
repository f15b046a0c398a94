"""Plant NaN or infinity in an activation, the loss, a gradient, the optimizer's state or a weight, at any step.

The run must end as diverged and name the site of the first value that is not finite. Its newest checkpoint must be
the last one before the fault, with finite weights.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import torch
from torch import Tensor

from mmqk.store import EXIT_CODES, cli_main, read_status
from mmqk.train import main
from mmqk.training.module import TrainingModule
from tests.soak.kills import BASE, DIAL

CASES, QUICK, SECONDS = 400, 16, 60.0
STEPS, EVERY = 8, 2
VALUES = (math.nan, math.inf, -math.inf)
MODULES = ("attention.w_q", "attention.w_k", "attention.w_v", "attention.w_o", "mlp", "mlp.w_up", "attn_pre_norm")
SITES = ("activation", "loss", "gradient", "moment", "weight")


def prepare(shared: Path) -> None:
    assert cli_main(main)([*BASE, *DIAL, f"--out={shared / 'whole'}"]) == 0


def case(number: int, rng: random.Random, shared: Path, work: Path) -> str:
    site, step, bad = SITES[number % len(SITES)], rng.randrange(STEPS), rng.choice(VALUES)
    layer, out = rng.randrange(2), work / "run"
    extra = rng.choice(([], ["--trainer.accumulate_grad_batches=2"], ["--trainer.precision=bf16-mixed"]))
    where = plant(site, step, bad, layer, rng)
    code = cli_main(main)([*BASE, *DIAL, *extra, "--checkpoint.keep=9", f"--out={out}"])
    status, told = read_status(out), f"{bad} in the {site} {where} at step {step} {extra}"
    assert status is not None and code == EXIT_CODES["diverged"] and status.status == "diverged", f"{told}: {status}"
    assert step <= status.step <= step + 2, f"{told}: diverged at step {status.step}"
    assert any(word in status.reason for word in ("NaN", "nan", "inf")), f"{told}: {status.reason}"
    expected = {"activation": f"layer {layer}", "weight": "the weight ", "gradient": "gradient"}
    assert expected.get(site, "") in status.reason, f"{told}: {status.reason}"
    newest = max((out / "checkpoints").glob("step*.ckpt"), default=None)
    first = step // EVERY * EVERY  # the last checkpoint before the step
    assert (newest is None) == (first == 0), f"{told}: the newest checkpoint is {newest}"
    if newest is None:
        return f"{site}: diverged before the first checkpoint"
    saved = torch.load(newest, weights_only=True)
    assert saved["global_step"] == first, f"{told}: the newest checkpoint is {newest.name}"
    bad_weights = [name for name, w in saved["state_dict"].items() if not w.isfinite().all()]
    assert not bad_weights, f"{told}: {newest.name} has {bad_weights}"
    json.loads((out / "status.json").read_text(), parse_constant=lambda text: 1 / 0)  # strict JSON
    return f"{site}: diverged"


def plant(site: str, step: int, bad: float, layer: int, rng: random.Random) -> str:
    """Change `TrainingModule` so that the micro-batches of this step have the fault. Return the name of the module
    whose activation has the fault; empty for another site."""
    training_step, place = TrainingModule.training_step, rng.choice(MODULES) if site == "activation" else ""
    index = rng.randrange(1000)

    def faulty(self: TrainingModule, *rest: object) -> Tensor:
        if self.trainer.global_step != step:
            return training_step(self, *rest)
        model = self.model
        parameters = [p for p in model.parameters() if p.requires_grad]
        chosen = parameters[index % len(parameters)]
        if site == "weight":
            spoil(chosen, bad)
        elif site == "moment":
            state = self.trainer.optimizers[0].state
            if not state:  # there are no moments before the first update
                spoil(chosen, bad)
            for moments in list(state.values())[:1]:
                spoil(moments["exp_avg"], bad)
        if site == "gradient":
            chosen.register_hook(lambda g: spoil(g.clone(), bad))
        elif site == "activation":
            module = model.blocks[layer].get_submodule(place)
            module.register_forward_hook(lambda m, x, out: spoil(out.clone(), bad))
        loss = training_step(self, *rest)
        return loss * bad if site == "loss" else loss

    TrainingModule.training_step = faulty  # type: ignore[method-assign]
    return place


def spoil(tensor: Tensor, bad: float) -> Tensor:
    with torch.no_grad():
        tensor.view(-1)[0] = bad
    return tensor
