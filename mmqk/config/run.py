"""The configuration of a run: read from a command line or from the parent of a fork, completed, and identified by the
fields that change it."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from mmqk.config.checks import check_run
from mmqk.config.parse import Fields, help_of, leaves
from mmqk.config.training import (
    IN_IDENTITY,
    AlarmConfig,
    CheckpointConfig,
    LossConfig,
    MonitorConfig,
    OptimConfig,
    TrainerConfig,
)
from mmqk.data.config import FOLDER_FIELDS, SOURCE_FIELDS, DataConfig, data_identity, layout
from mmqk.data.shards.manifest import sha256_file
from mmqk.model.config import ModelConfig
from mmqk.model.patch import allow_patch
from mmqk.model.ranges import MOST_SEED, MOST_STEPS, SMALLEST_PERTURBATION, check_fields, default_of, number, shortened
from mmqk.store import UserError, check_local, flatten, identity_hash, read_details, with_configs
from mmqk.store.files import CONFIGS, SHIPPED

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "loss": LossConfig,
    "optim": OptimConfig,
    "monitor": MonitorConfig,
    "checkpoint": CheckpointConfig,
    "alarm": AlarmConfig,
}

# Fields that change the state at the start of a fork.
CHANGES = ("fork_skip_batches", "fork_noise", "fork_seed", "fork_new_moments", "fork_skip")
MOST_SKIPPED = 1_000_000  # sequences of fork_skip

# Fields that later versions of mmqk added. A field at its default is not part of a run's identity, so the ids of
# earlier runs stay valid. `mmqk.data.config.data_identity` does the same for data.
NEWER = {
    "model": (
        "attn_gate", "attn_sink", "head_scale", "mlp_clamp", "mlp_norm", "residual_gate", "depth_scale", "embed_norm",
        "deep_norm", "separate_first", "separate_last", "patch",
    ),
    "monitor": ("at", "matrices", "second_moment", "sharpness"),
    "optim": ("matrices", "update_clip", "adagc", "skip_step", "msign_every", "width_scaling", "base_width"),
    "loss": ("chunk_size",),
    "alarm": ("stop_diverged",),
}  # fmt: skip


@dataclass(frozen=True)
class Given:
    """What a command line gives.

    Attributes:
        out: run folder (default: runs/NAME/<id>; NAME is that of your configuration, else of your data, else of the
            shipped configuration).
        seed: seed of initial weights, dropout and data order.
        backend: attention backend: math, sdpa, sdpa_flash, sdpa_efficient, sdpa_cudnn or flex.
        compile: compile blocks, norms and loss (torch.compile), for GPUs: faster steps after a slower start.
        activation_checkpointing: compute the activations of each block again in the backward pass: less memory, more
            computation.
        threads: CPU threads; 0: torch chooses.
        logging: loggers besides metrics.jsonl.
        quiet: print only the status and the run folder, and warnings on stderr.
        fork: start from this checkpoint (or the newest one of a run folder) with the configuration of its run; the
            fields given here replace those of that run.
        fork_skip_batches: skip this number of batches at the start of the fork.
        fork_noise: RMS of the noise that is added to each weight matrix of the fork, divided by the RMS of the
            matrix.
        fork_seed: seed of that noise.
        fork_new_moments: start the optimizer of the fork without the moments of the parent.
        fork_skip: leave out these sequences, such as 26,27 or 26-57; mmqk inspect RUN --step N lists their numbers.
    """

    out: str | None = None
    seed: int = number(0, 0, MOST_SEED)
    backend: str = "sdpa"
    compile: bool = False
    activation_checkpointing: bool = False
    threads: int = number(0, 0, 1024)
    logging: list[Literal["tensorboard", "wandb", "mlflow"]] = field(default_factory=lambda: ["tensorboard"])
    quiet: bool = False
    fork: str | None = None
    fork_skip_batches: int = number(0, 0, MOST_STEPS)
    fork_noise: float = number(0.0, SMALLEST_PERTURBATION, 1.0, zero=True)
    fork_seed: int = number(0, 0, MOST_SEED)
    fork_new_moments: bool = False
    fork_skip: str = ""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    alarm: AlarmConfig = field(default_factory=AlarmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    def __post_init__(self) -> None:
        check_fields(self, "")

    def fork_changes(self) -> dict[str, Any]:
        """Return what a fork changes at its start; the newer fields only if they are set, so that the ids of older
        forks stay valid."""
        changes = {name: getattr(self, name) for name in CHANGES}
        return {name: v for name, v in changes.items() if v or name not in ("fork_new_moments", "fork_skip")}


@dataclass(frozen=True)
class Parent:
    """The parent run of a fork, at one of its steps.

    Attributes:
        id: Id of the run; of an import, the first digits of its checkpoint's sha256.
        step: Number of optimizer steps that the run has taken at this point; 0 for an import.
        config: Resolved configuration of the run (``RunConfig.nested()``); of an import, only that of the model.
        checkpoint: The checkpoint file; None if it does not exist yet.
    """

    id: str
    step: int
    config: Mapping[str, Any]
    checkpoint: Path | None = None

    @property
    def is_import(self) -> bool:
        """Whether the parent is a checkpoint with weights only, so that a fork starts like a new run."""
        return "optim" not in self.config


@dataclass(frozen=True, kw_only=True)
class RunConfig(Given):
    """A complete configuration: the fields of a command line, with the run folder and the vocabulary of the data.

    Attributes:
        identity: the fields that identify the run (see `mmqk.store.folder`), as plain data.
        parent: the run that a fork starts from; None for a run from initial weights.
    """

    out: Path  # type: ignore[assignment]
    identity: dict[str, Any]
    parent: Parent | None = None

    @property
    def id(self) -> str:
        return identity_hash(self.identity)

    @property
    def ranks(self) -> dict[str, Any]:
        """Strategy and number of processes; a resume with the same strategy and number is exact."""
        return {"strategy": self.trainer.strategy, "processes": self.trainer.processes}

    def nested(self) -> dict[str, Any]:
        """Return the configuration as plain data; the parser accepts it as ``--config``."""
        names = ("backend", "compile", "activation_checkpointing", "seed", "threads", "logging", "trainer")
        plain, fork = asdict(self), {"fork": self.fork, **self.fork_changes()} if self.fork else {}
        return {name: plain[name] for name in (*SECTIONS, *names)} | fork

    def record(self) -> dict[str, Any]:
        """Return the id and configuration that a checkpoint stores, for forks."""
        return {"id": self.id, "config": replace(self, fork=None).nested()}


def help_text() -> str:
    """Return the help of ``mmqk train``."""
    return f"""\
usage: mmqk train [CONFIG.yaml ...] [FIELD=VALUE ...]

Train one run. Everything it measures goes to the run folder: config.yaml, metrics.jsonl, status.json, TensorBoard
events and checkpoints/. Run the same command again to resume. CONFIG.yaml is the YAML of a run, or the name of a
shipped one (demo); of several, the last one wins.

Example: mmqk train demo optim.lr=0.03 model.qk_norm.kind=rms

{help_of(Given)}"""


def defaults() -> dict[str, Any]:
    """Return the default of every field by dotted name. `model.vocab_sizes` has no default, because it comes from the
    data."""
    return flatten({name: leaf.default for name, leaf in leaves(Given).items()})


def resolve(argv: list[str], parent: Parent | None = None) -> RunConfig:
    """Parse, check and complete a command line of ``mmqk train``.

    Args:
        argv: the command line; ``demo optim.lr=0.01`` is short for ``--config configs/demo.yaml --optim.lr=0.01``.
        parent: the parent of a fork whose checkpoint does not exist yet. If it is None and the run is a fork,
            ``--fork`` in ``argv`` gives the checkpoint.

    Raises:
        UserError: an unknown field, a wrong type, an impossible value, missing data or tokenizers, or an impossible
            fork.
        SystemExit: after printing help.
    """
    if {"-h", "--help"} & {*argv}:
        print(help_text())
        raise SystemExit(0)
    argv = with_configs(argv)
    configs, given = _read(argv)
    if parent is None and given.fork is None:
        for name in CHANGES:
            if getattr(given, name):
                raise UserError(f"{name} belongs to a fork: name its checkpoint with --fork.")
        return _complete(configs, given)
    try:
        if given.model.patch:
            allow_patch(given.model.patch)  # the checkpoint may have it too
        parent = parent or read_parent(given.fork or "", given.out)
    except ValueError as error:
        raise UserError(str(error)) from error
    return _complete(*_read(argv, base_of(parent)), parent)


def _read(argv: list[str], base: Mapping[str, Any] | None = None) -> tuple[list[Path], Given]:
    """Return the configuration files of a command line, and its fields; ``base`` has the fields of a parent."""
    fields = Fields(Given)
    fields.add(base or {})
    fields.add_words(argv)
    # A relative folder of a file is first looked up beside the file.
    for name in (*SOURCE_FIELDS.values(), "tokens", "tokenizers"):
        folder, file = fields.values.get(f"data.{name}"), fields.files.get(f"data.{name}")
        if folder and file and _exists(str(file.parent), str(folder)):
            fields.values[f"data.{name}"] = os.path.normpath(file.parent / str(folder))
    return fields.configs, fields.build()


def base_of(parent: Parent) -> dict[str, Any]:
    """Return the parent's configuration, which the fork's fields override."""
    config = {name: dict(v) if isinstance(v, Mapping) else v for name, v in parent.config.items()}
    for name in ("fork", *CHANGES):
        config.pop(name, None)
    for section in ("model", "data"):
        config[section]["patch"] = ""  # code, which the command line must name again (`_refuse_fork`)
    config["model"]["vocab_sizes"] = {}  # derived from the fork's data, then compared with the parent's
    config["checkpoint"]["at"] = []  # these are steps of the parent
    return config


def read_parent(given: str, out: str | None = None) -> Parent:
    """Return the run that wrote the checkpoint of ``--fork`` (a file, or the newest one in a run folder).

    If the fork already exists in ``out``, return the parent in its run.json, even if the parent has removed this
    checkpoint since.

    Raises:
        UserError: the checkpoint does not exist, cannot be read, or does not name its run.
    """
    noted = read_details(Path(out)).get("fork") if out else None
    if isinstance(noted, dict) and noted.get("given") == given:
        return Parent(noted["id"], noted["step"], noted["config"], Path(noted["checkpoint"]))
    from mmqk.checkpoint import load_checkpoint, newest_checkpoint  # imports torch

    path = Path(given)
    if path.is_dir() and path.suffix != ".ckpt":
        try:
            path = newest_checkpoint(path)
        except UserError as error:
            raise UserError(f"--fork: {error}") from error
    if not path.exists():
        raise UserError(
            f"--fork {given} does not exist: name a checkpoint or the folder of a run, or resume a fork with its --out."
        )
    saved = load_checkpoint(path, "name another one after --fork")
    if "global_step" not in saved:
        return Parent(sha256_file(path)[:10], 0, {"model": saved["mmqk_model"], "data": {}, "checkpoint": {}}, path)
    run = saved.get("mmqk_run")
    if not isinstance(run, dict) or not isinstance(run.get("id"), str) or not isinstance(run.get("config"), dict):
        raise UserError(f"--fork {given} does not name the run that wrote it: use a checkpoint that mmqk train wrote.")
    return Parent(run["id"], saved["global_step"], run["config"], path)


def note_parent(run: RunConfig) -> dict[str, Any]:
    """Return the record of the parent of a fork for run.json, which `read_parent` reads."""
    assert run.parent is not None
    return {"given": run.fork, **asdict(run.parent), "checkpoint": str(run.parent.checkpoint)}


def _complete(configs: list[Path], given: Given, parent: Parent | None = None) -> RunConfig:
    data = given.data
    try:
        vocab_sizes = layout(data).vocab_sizes
        if given.model.vocab_sizes not in ({}, vocab_sizes):
            raise ValueError(
                f"model.vocab_sizes is {given.model.vocab_sizes}, but the vocabulary of the data has {vocab_sizes}:"
                " leave model.vocab_sizes out, or set --data.tokenizers."
            )
        given = replace(given, model=replace(given.model, vocab_sizes=vocab_sizes))
        check_run(given, parent)
        identity = _identity_of(given, parent)
    except ValueError as error:
        raise UserError(str(error)) from error
    check_local(given.out or "", "out", "name a local folder")
    name = _name_of(configs, data) if parent is None or configs else "fork"
    values = {f.name: getattr(given, f.name) for f in fields(given)} | {
        "logging": list(dict.fromkeys(given.logging)),
        "out": Path(given.out) if given.out else Path("runs") / name / identity_hash(identity),
    }
    return RunConfig(**values, identity=identity, parent=parent)


def _name_of(configs: list[Path], data: DataConfig) -> str:
    """Return the name of the folder of the run: that of the user's own configuration (of its project if the file is
    config.yaml), else of the user's own data, else of the shipped configuration."""
    shipped = (SHIPPED / CONFIGS[0]).resolve()
    for file in (config.resolve() for config in reversed(configs)):
        if not file.is_relative_to(shipped):
            is_project = file.stem == "config" and not (file.parent / "run.json").exists()
            return (file.parent.name if is_project else "") or file.stem
    kinds = ("tokens",) if "tokens" in data.family else data.sources
    for name in (FOLDER_FIELDS[kind] for kind in kinds):
        if (source := getattr(data, name)) != getattr(DataConfig, name):
            path = Path(source)
            while re.search(r"[*?\[{]", path.name):
                path = path.parent
            return path.absolute().name.removesuffix(".tar") or "run"
    return configs[-1].stem if configs else "run"


def _exists(folder: str, name: str) -> bool:
    """Return whether a folder has a path or a match of a pattern; for a pattern with braces, such as
    ``a/{00..09}.tar``, whether it has the folder of the pattern."""
    beside = os.path.join(folder, name)
    if "{" in name:
        return os.path.exists(os.path.dirname(beside))
    return os.path.exists(beside) or any(glob.iglob(os.path.join(glob.escape(folder), name), recursive=True))


def sequences(skip: str) -> list[int]:
    """Return the sequence numbers of `fork_skip`, ascending.

    Raises:
        ValueError: it has another form.
    """
    parts = [part.strip() for part in skip.strip().removeprefix("[").removesuffix("]").split(",")]
    found = [re.fullmatch(r"(\d{1,15})(?:-(\d{1,15}))?", part) for part in parts if part]
    ends = [(int(match[1]), int(match[2] or match[1])) for match in found if match]
    if None in found or any(b < a for a, b in ends) or sum(b - a + 1 for a, b in ends) > MOST_SKIPPED:
        raise ValueError(
            f"fork_skip is {shortened(skip)}: give sequence numbers such as 26,27 or 26-57, at most {MOST_SKIPPED:,}."
        )
    return sorted({n for a, b in ends for n in range(a, b + 1)})


def _identity_of(given: Given, parent: Parent | None) -> dict[str, Any]:
    """Return the fields that identify a run, as plain data.

    Raises:
        UserError: a source of the data is missing or damaged. ValueError: a patch does not exist.
    """
    sections = ("model", "loss", "optim", "monitor", "alarm")
    identity: dict[str, Any] = {name: asdict(getattr(given, name)) for name in sections}
    for section, names in NEWER.items():
        for f in fields(SECTIONS[section]):
            if f.name in names and identity[section][f.name] == default_of(f):
                del identity[section][f.name]
    if given.model.patch:
        identity["model"]["patch_source"] = allow_patch(given.model.patch)
    if given.optim.schedule_steps in (None, given.trainer.max_steps):  # null means max_steps
        del identity["optim"]["schedule_steps"]
    if given.compile:  # fused operations round differently
        identity["compile"] = True
    if not given.alarm.acts:  # alarms that only report do not change the run
        del identity["alarm"]
    identity["data"] = data_identity(given.data)
    identity |= {"backend": given.backend, "seed": given.seed}
    identity["trainer"] = {name: getattr(given.trainer, name) for name in IN_IDENTITY}
    if given.trainer.deterministic:  # deterministic kernels sum in another order
        identity["trainer"]["deterministic"] = True
    if parent is not None:
        identity["fork"] = {"parent": parent.id, "step": parent.step}
        identity["fork"] |= {name.removeprefix("fork_"): value for name, value in given.fork_changes().items()}
        if given.fork_skip:
            identity["fork"]["skip"] = sequences(given.fork_skip)
    return identity


def print_yaml(run: RunConfig) -> str:
    """Return the resolved configuration as YAML."""
    return yaml.safe_dump(run.nested(), sort_keys=False, allow_unicode=True)
