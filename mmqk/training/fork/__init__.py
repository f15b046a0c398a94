"""A fork: a run that begins at a checkpoint of another run, converted to the configuration of the fork.

`make_fork` writes its first checkpoint: `weights` converts the model, with gains from `measure`, and `state` the rest.
"""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mmqk.checkpoint import PREFIX, load_checkpoint, save_checkpoint
from mmqk.config.fork import CHANGES, ForkConfig
from mmqk.config.run import NEWER, SECTIONS
from mmqk.data.batch import TokenBatch
from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.model.linear import parameter_generator
from mmqk.model.patch import named_function
from mmqk.model.ranges import default_of
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
    fork = run.fork
    assert fork is not None
    saved = _parent(fork)
    cuda = torch.cuda.is_available() and run.trainer.get("accelerator") != "cpu"
    device = torch.device("cuda" if cuda else "cpu")
    probe = probe.to(device)
    old = _model(ModelConfig.from_dict(saved["mmqk_model"]), run.seed, device)
    old.load_state_dict({k.removeprefix(PREFIX): v for k, v in saved["state_dict"].items()})
    new = _model(replace(run.model, patch=old.config.patch), run.seed, device)
    carried = carry(old, new, probe)
    if run.model.patch != old.config.patch:
        named_function(run.model.patch)(new)
    if fork.noise:
        perturb(new, fork.noise, fork.seed)
    change = change_of_function(old, new, probe)

    own = run.nested()
    content = {
        "mmqk_model": own["model"],
        "state_dict": {PREFIX + name: value.cpu() for name, value in new.state_dict().items()},
    }
    if fork.parent.is_import:
        changed = changes({"model": asdict(old.config)}, {"model": own["model"], "compile": False})
        write_json(folder / FORK_NAME, _record(run, changed, carried, "all moments start at zero", change))
        save_checkpoint(content, folder / START_NAME)
        return sentence(run, changed, change)
    changed = changes(dict(fork.parent.config), own)
    state, moments = forked_state(run, saved, old, new, carried, change, [c["field"] for c in changed])
    loader = state["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]
    position = {name: value for name, value in loader.items() if name != "streams"}
    write_json(folder / FORK_NAME, {**_record(run, changed, carried, moments, change), "data": position})
    save_checkpoint(saved | content | state, folder / "checkpoints" / checkpoint_name(fork.parent.step))
    return sentence(run, changed, change)


def load_start(model: nn.Module, folder: Path) -> None:
    """Give a model the initial weights of a fork of an import."""
    saved = load_checkpoint(folder / START_NAME, "remove the run folder and fork again")
    model.load_state_dict({name.removeprefix(PREFIX): value for name, value in saved["state_dict"].items()})


def _parent(fork: ForkConfig) -> dict[str, Any]:
    """Return the content of the parent's checkpoint."""
    assert fork.checkpoint is not None
    if not fork.checkpoint.exists():
        raise UserError(f"The checkpoint {fork.checkpoint} of --fork does not exist: name another after --fork.")
    saved = load_checkpoint(fork.checkpoint, "name another one after --fork", whole=not fork.parent.is_import)
    if fork.parent.is_import:
        return saved
    writer = (saved.get("mmqk_run", {}).get("id"), saved["global_step"])
    if writer != (fork.parent.id, fork.parent.step):
        raise UserError(
            f"{fork.checkpoint} is no longer step {fork.parent.step} of run {fork.parent.id}: give another --out."
        )
    return saved


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
    fork = run.fork
    assert fork is not None
    parts = [f"{c['field']} {_yaml(c['to'])}" for c in changed]
    parts += [f"the next {fork.skip_batches} batches skipped"] if fork.skip_batches else []
    parts += [f"{len(fork.skipped)} sequences left out"] if fork.skipped else []
    parts += [f"weights perturbed by {fork.noise:g} of their RMS"] if fork.noise else []
    parts += ["new moments of the optimizer"] if fork.new_moments else []
    losses = ", ".join(f"{name} {before:.4f} -> {after:.4f}" for name, (before, after) in change.loss.items())
    near = (
        "the function equals the parent's bit for bit (in fp32, before the first step)"
        if change.logits == 0
        else f"logits differ by {plain(change.logits, 2)} of their RMS, loss {losses}"
    )
    start = f"import {fork.given}" if fork.parent.is_import else f"step {fork.parent.step} of run {fork.parent.id}"
    return f"forked from {start} with {', '.join(parts) or 'nothing changed'}: {near}"


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _record(
    run: RunConfig, changed: list[dict[str, Any]], carried: Carried, optimizer: str, change: Change
) -> dict[str, Any]:
    fork = run.fork
    assert fork is not None and fork.checkpoint is not None
    given = Path(fork.given)
    parent = {
        "id": fork.parent.id,
        "folder": str(given.parent.parent) if given.suffix == ".ckpt" else fork.given,
        "checkpoint": str(fork.checkpoint),
        "step": fork.parent.step,
    }
    return {
        "parent": parent,
        "changed": changed,
        **{name: getattr(fork, name) for name in CHANGES},
        "skip": list(fork.skipped),
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
