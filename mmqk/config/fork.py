"""Configuration of a fork: its parent, the checkpoint that it starts from, and the fields that it may change."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmqk.config.training import OptimConfig
from mmqk.model.config import ModelConfig
from mmqk.model.ranges import MOST_SEED, MOST_STEPS, SMALLEST_PERTURBATION, check_fields, number, refuse, shortened
from mmqk.store import UserError, read_details

# Fields of `ForkConfig` that change the state at the start of a fork; on the command line they begin with fork_.
CHANGES = ("skip_batches", "noise", "seed", "new_moments", "skip")
MOST_SKIPPED = 1_000_000


@dataclass(frozen=True)
class Parent:
    """The parent run of a fork, at one of its steps.

    Attributes:
        id: Id of the run; of an import, the first digits of its checkpoint's sha256.
        step: Number of optimizer steps that the run has taken at this point; 0 for an import.
        config: Resolved configuration of the run (``RunConfig.nested()``); of an import, only that of the model.
    """

    id: str
    step: int
    config: Mapping[str, Any]

    @property
    def is_import(self) -> bool:
        """Whether the parent is a checkpoint with weights only, so that a fork starts like a new run."""
        return "optim" not in self.config


@dataclass(frozen=True)
class ForkConfig:
    """The checkpoint that a fork starts from, and the changes at its start.

    Attributes:
        parent: the run that wrote the checkpoint.
        given: the checkpoint or run folder on the command line; empty if only the parent is known.
        checkpoint: the checkpoint file; None if it does not exist yet.
        skip_batches: number of batches (one per optimizer step) to skip before the first step.
        noise: RMS of the noise added to each weight matrix, divided by the RMS of the matrix.
        seed: seed of the noise.
        new_moments: whether the optimizer starts without the moments of the parent.
        skip: sequence numbers to leave out, such as ``26,27`` or ``26-57``.
    """

    parent: Parent
    given: str = ""
    checkpoint: Path | None = None
    skip_batches: int = number(0, 0, MOST_STEPS)
    noise: float = number(0.0, SMALLEST_PERTURBATION, 1.0, zero=True)
    seed: int = number(0, 0, MOST_SEED)
    new_moments: bool = False
    skip: str = ""

    def __post_init__(self) -> None:
        check_fields(self, "fork", "_")
        _ = self.skipped
        refuse({
            "fork_seed has no effect while fork_noise is 0: set fork_noise.": self.seed and not self.noise,
            f"fork_skip skips the data of a parent, but {self.given} is an import: leave it out.":
                (self.skip_batches or self.skip) and self.parent.is_import,
        })  # fmt: skip

    @property
    def identity(self) -> dict[str, Any]:
        """The fields of the fork that are part of the run's identity."""
        skipped = {"skip": list(self.skipped)} if self.skip else {}
        return {"parent": self.parent.id, "step": self.parent.step, **self._changes(), **skipped}

    @property
    def skipped(self) -> tuple[int, ...]:
        """The sequence numbers of `skip`, ascending.

        Raises:
            ValueError: `skip` has another form.
        """
        parts = [part.strip() for part in self.skip.strip().removeprefix("[").removesuffix("]").split(",")]
        found = [re.fullmatch(r"(\d{1,15})(?:-(\d{1,15}))?", part) for part in parts if part]
        ends = [(int(match[1]), int(match[2] or match[1])) for match in found if match]
        if None in found or any(b < a for a, b in ends) or sum(b - a + 1 for a, b in ends) > MOST_SKIPPED:
            raise ValueError(
                f"fork_skip is {shortened(self.skip)}: give sequence numbers such as 26,27 or 26-57, at most"
                f" {MOST_SKIPPED:,}."
            )
        return tuple(sorted({n for a, b in ends for n in range(a, b + 1)}))

    def flags(self) -> dict[str, Any]:
        """Return the fork's fields by their names on the command line."""
        return {"fork": self.given, **self._changes("fork_")} if self.given else {}

    def _changes(self, prefix: str = "") -> dict[str, Any]:
        """Return the changes; the newer ones only if they are set, so that the ids of older forks stay valid."""
        names = (name for name in CHANGES if name not in ("new_moments", "skip") or getattr(self, name))
        return {f"{prefix}{name}": getattr(self, name) for name in names}


def base_of(parent: Parent) -> dict[str, Any]:
    """Return the parent's configuration, which the fork's fields override."""
    config = {name: dict(v) if isinstance(v, Mapping) else v for name, v in parent.config.items()}
    for name in ("fork", *(f"fork_{change}" for change in CHANGES)):
        config.pop(name, None)
    for section in ("model", "data"):
        config[section]["patch"] = ""  # code, which the command line must name again (`check_patches`)
    config["model"]["vocab_sizes"] = {}  # derived from the fork's data, then compared with the parent's
    config["checkpoint"]["at"] = []  # these are steps of the parent
    return config


def read_parent(given: str, out: str | None = None) -> tuple[Path, Parent]:
    """Return the checkpoint of ``--fork`` (a file, or the newest one in a run folder) and the run that wrote it.

    If the fork already exists in ``out``, return the checkpoint that its run.json names, even if the parent has
    removed this file since.

    Raises:
        UserError: the checkpoint does not exist, cannot be read, or does not name its run.
    """
    noted = read_details(Path(out)).get("fork") if out else None
    if isinstance(noted, dict) and noted.get("given") == given:
        return Path(noted["checkpoint"]), Parent(noted["id"], noted["step"], noted["config"])
    from mmqk.checkpoint import load_checkpoint, newest_checkpoint  # imports torch

    path = Path(given)
    if path.is_dir() and path.suffix != ".ckpt":
        try:
            path = newest_checkpoint(path)
        except UserError as error:
            raise UserError(f"--fork: {error}") from error
    if not path.exists():
        raise UserError(f"--fork {given} does not exist: name a checkpoint or the folder of a run.")
    saved = load_checkpoint(path, "name another one after --fork")
    if "global_step" not in saved:
        with open(path, "rb") as file:
            id = hashlib.file_digest(file, "sha256").hexdigest()[:10]
        return path, Parent(id, 0, {"model": saved["mmqk_model"], "data": {}, "checkpoint": {}})
    saved = load_checkpoint(path, "name another one after --fork", whole=True)
    run = saved.get("mmqk_run")
    if not isinstance(run, dict) or not isinstance(run.get("id"), str) or not isinstance(run.get("config"), dict):
        raise UserError(f"--fork {given} does not name the run that wrote it: use a checkpoint that mmqk train wrote.")
    return path, Parent(run["id"], saved["global_step"], run["config"])


def note(fork: ForkConfig) -> dict[str, Any]:
    """Return the record of the fork for run.json, which `read_parent` reads."""
    parent = fork.parent
    where = {"given": fork.given, "checkpoint": str(fork.checkpoint)}
    return {**where, "id": parent.id, "step": parent.step, "config": dict(parent.config)}


def check_patches(parent: Mapping[str, Any], model_patch: str, data_patch: str) -> None:
    """Raise ValueError if a fork does not name the patches in the configuration of its parent."""
    patches = {"model": model_patch, "data": data_patch}
    given = {section: parent[section].get("patch", "") for section in patches}
    refuse({
        f"the parent has {section}.patch {given[section]}, which a fork keeps but runs only if you name it too: add"
        f" {section}.patch={given[section]}.": given[section] not in ("", patch)
        for section, patch in patches.items()
    })  # fmt: skip


def check_moments(parent: Mapping[str, Any], optim: OptimConfig) -> None:
    """Raise ValueError if a fork cannot use the moments of its parent, whose `optim` is given."""
    before = parent.get("matrices", "adamw")
    scaled = (parent.get("width_scaling", "none"), parent.get("base_width"))
    refuse({
        f"optim.matrices is {before} in the parent and {optim.matrices} here, and a fork cannot change it, because the"
        " moments of muon differ from those of Adam: keep the parent's value, or start a new run.":
            before != optim.matrices and "muon" in (before, optim.matrices),
        "optim.width_scaling and optim.base_width set the initial weights too, so a fork cannot change them: keep the"
        " parent's values, or start a new run.":
            scaled != (optim.width_scaling, optim.base_width) and {scaled[0], optim.width_scaling} != {"none"},
    })  # fmt: skip


def check_forkable(old: ModelConfig, new: ModelConfig) -> None:
    """Raise ValueError if the weights of ``old`` do not fit into ``new``."""
    shapes = {
        "d_model": "d_model",
        "n_layers": "n_layers",
        "n_heads": "n_heads",
        "kv_heads": "n_kv_heads",
        "head_dim": "d_head",
        "mlp_width": "d_ff",
        "mlp": "mlp",
        "deep_norm": "deep_norm",
        "separate_first": "separate_first",
        "separate_last": "separate_last",
        "vocab_sizes": "vocab_sizes",
    }
    for attribute, field in shapes.items():
        parent, child = getattr(old, attribute), getattr(new, attribute)
        changed = parent != child or (attribute == "vocab_sizes" and list(parent) != list(child))
        refuse({
            f"model.{field} is {parent} in the parent and {child} here, and a fork cannot change it: keep the parent's"
            " value, or start a new run.": changed,
        })  # fmt: skip
    separate = new.separate_first or new.separate_last
    refuse({
        "model.tie_embeddings cannot be switched on in a fork, because the parent has a separate head: start a new"
        " run.": new.tie_embeddings and not old.tie_embeddings,
        "model.layer_scale cannot be switched on or off in a fork of a model with model.separate_first or"
        " model.separate_last: start a new run.":
            separate and (new.layer_scale is None) != (old.layer_scale is None),
    } | {
        f"model.per_modality.{name} cannot be switched off in a fork, because the parent has separate weights for each"
        " modality: start a new run.":
            untied and not getattr(new.per_modality, name) and not (name == "qk_norm" and new.qk_norm.kind == "none")
        for name, untied in asdict(old.per_modality).items()
    })  # fmt: skip
