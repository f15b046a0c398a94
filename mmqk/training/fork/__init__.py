"""A fork: a run that begins at a checkpoint of another run, converted to the configuration of the fork.

`make_fork` writes its first checkpoint: `weights` converts the model, with gains from `measure`, and `state` the rest.
"""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mmqk.checkpoint import PREFIX, load_checkpoint, save_checkpoint, weights_of
from mmqk.config.checks import sequences
from mmqk.config.run import CHANGES, NEWER, SECTIONS
from mmqk.data.batch import TokenBatch
from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.model.linear import parameter_generator
from mmqk.model.ranges import default_of, named_function
from mmqk.store import UserError, differing_fields, flatten, write_json
from mmqk.store.checkpoint_files import checkpoint_name
from mmqk.store.formatting import plain
from mmqk.training.fork.measure import Change, change_of_function
from mmqk.training.fork.state import forked_state
from mmqk.training.fork.weights import Carried, carry

if TYPE_CHECKING:
    from mmqk.config import RunConfig


PROBE_SEQUENCES = 16
FORK_NAME = "fork.json"
START_NAME = "start.ckpt"  # the initial weights of a fork of an import
# Fields that change the devices, speed or loggers of a run but not its result.
NOT_CHANGES = ("checkpoint.", "threads", "logging", "activation_checkpointing", "data.workers", "data.cache",
               "fork", "trainer.devices", "trainer.num_nodes", "trainer.strategy")  # fmt: skip


def make_fork(run: RunConfig, folder: Path, probe: TokenBatch) -> str:
    """Write the first checkpoint of a fork and ``fork.json``; return a sentence that describes the fork.

    A fork of an import gets `START_NAME` instead, because it has no optimizer state: it starts like a new run, but
    with these weights.

    Args:
        run: The configuration, with its `fork`.
        folder: The run folder.
        probe: Held-out sequences. New gains are computed from the parent's activations on them, and the outputs of
            parent and fork are compared on them.

    Raises:
        UserError: the parent's checkpoint is missing, damaged, or not of the run and step in the configuration.
    """
    parent = run.parent
    assert parent is not None and parent.checkpoint is not None
    saved = load_checkpoint(parent.checkpoint, "name another one after --fork")
    writer = (saved.get("mmqk_run", {}).get("id"), saved.get("global_step"))
    if not parent.is_import and writer != (parent.id, parent.step):
        raise UserError(f"{parent.checkpoint} is no longer step {parent.step} of run {parent.id}: give another --out.")
    device = torch.device("cuda" if torch.cuda.is_available() and run.trainer.accelerator != "cpu" else "cpu")
    probe = probe.to(device)
    old = _model(ModelConfig.from_dict(saved["mmqk_model"]), run.seed, device)
    old.load_state_dict(weights_of(saved))
    new = _model(replace(run.model, patch=old.config.patch), run.seed, device)
    carried = carry(old, new, probe)
    if run.model.patch != old.config.patch:
        named_function(run.model.patch)(new)
    if run.fork_noise:
        perturb(new, run.fork_noise, run.fork_seed)
    change = change_of_function(old, new, probe)

    own, file = run.nested(), folder / START_NAME
    content = {
        "mmqk_model": own["model"],
        "state_dict": {PREFIX + name: value.cpu() for name, value in new.state_dict().items()},
    }
    if parent.is_import:
        changed = changes({"model": asdict(old.config)}, {"model": own["model"], "compile": False})
        record = _record(run, changed, carried, "all moments start at zero", change)
    else:
        changed = changes(dict(parent.config), own)
        state, moments = forked_state(run, saved, old, new, carried, change, [c["field"] for c in changed])
        loader = state["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]
        position = {name: value for name, value in loader.items() if name != "streams"}
        record = {**_record(run, changed, carried, moments, change), "data": position}
        content, file = saved | content | state, folder / "checkpoints" / checkpoint_name(parent.step)
    write_json(folder / FORK_NAME, record)
    save_checkpoint(content, file)
    return sentence(run, changed, change)


def load_start(model: nn.Module, folder: Path) -> None:
    """Give a model the initial weights of a fork of an import."""
    saved = load_checkpoint(folder / START_NAME, "remove the run folder and fork again")
    model.load_state_dict(weights_of(saved))


@torch.no_grad()
def perturb(model: nn.Module, size: float, draw: int) -> None:
    """Add noise to every weight matrix, with an RMS of ``size`` times the RMS of the matrix. ``draw`` and the
    weight's name determine the noise."""
    done = set()
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and module.weight not in done:
            weight = module.weight
            done.add(weight)  # change a tied matrix once
            generator = parameter_generator(draw, f"fork/{name}")
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            wide = weight.double().cpu()
            wide += noise * (size * wide.square().mean().sqrt() / noise.square().mean().sqrt())
            weight.copy_(wide)


def changes(parent: dict[str, Any], own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the fields in which two configurations differ, except the fields that do not affect the result."""
    parent = _with_newer_fields(parent)
    a, b = flatten(parent), flatten(own)
    differing = differing_fields(parent, own)
    names = [
        f
        for f in differing
        if not f.startswith(NOT_CHANGES)
        # If a mapping is empty in only one of the configurations, list its entries in the other configuration.
        and not any(other.startswith(f"{f}.") for other in differing)
    ]
    return [{"field": field, "from": a.get(field), "to": b.get(field)} for field in names]


def _with_newer_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the fields that its version of mmqk did not have, at their defaults."""
    newer = {}
    for section, names in NEWER.items():
        if section in config:
            defaults = {f.name: default_of(f) for f in fields(SECTIONS[section]) if f.name in names}
            newer[section] = defaults | config[section]
    return {"compile": False, **config, **newer}


def sentence(run: RunConfig, changed: list[dict[str, Any]], change: Change) -> str:
    """Return a sentence with the parent, the changed fields, and the change of the outputs."""
    parent, skipped = run.parent, sequences(run.fork_skip)
    assert parent is not None
    parts = [f"{c['field']} {_yaml(c['to'])}" for c in changed]
    parts += [f"the next {run.fork_skip_batches} batches skipped"] if run.fork_skip_batches else []
    parts += [f"{len(skipped)} sequences left out"] if skipped else []
    parts += [f"weights perturbed by {run.fork_noise:g} of their RMS"] if run.fork_noise else []
    parts += ["new moments of the optimizer"] if run.fork_new_moments else []
    losses = ", ".join(f"{name} {before:.4f} -> {after:.4f}" for name, (before, after) in change.loss.items())
    near = (
        "the function equals the parent's bit for bit (in fp32, before the first step)"
        if change.logits == 0
        else f"logits differ by {plain(change.logits, 2)} of their RMS, loss {losses}"
    )
    start = f"import {run.fork}" if parent.is_import else f"step {parent.step} of run {parent.id}"
    return f"forked from {start} with {', '.join(parts) or 'nothing changed'}: {near}"


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _record(
    run: RunConfig, changed: list[dict[str, Any]], carried: Carried, optimizer: str, change: Change
) -> dict[str, Any]:
    assert run.parent is not None and run.fork is not None
    given = Path(run.fork)
    parent = {
        "id": run.parent.id,
        "folder": str(given.parent.parent) if given.suffix == ".ckpt" else run.fork,
        "checkpoint": str(run.parent.checkpoint),
        "step": run.parent.step,
    }
    return {
        "parent": parent,
        "changed": changed,
        **{name.removeprefix("fork_"): getattr(run, name) for name in CHANGES},
        "skip": sequences(run.fork_skip),
        "added": [{"name": name, "how": how} for name, how in carried.added.items()],
        "dropped": [{"name": name, "how": how} for name, how in carried.dropped.items()],
        "optimizer": optimizer,
        "function": {
            "logits_rms_relative": change.logits,
            "loss": {name: list(values) for name, values in change.loss.items()},
        },
    }


def _model(config: ModelConfig, seed: int, device: torch.device) -> EarlyFusionTransformer:
    return EarlyFusionTransformer(config, "math", seed).to(device).eval()
