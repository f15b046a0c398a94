"""The resolved configuration of a run, and the fields of it that identify the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from mmqk.config.fork import ForkConfig
from mmqk.config.trainer import IN_IDENTITY, TrainerConfig
from mmqk.config.training import CheckpointConfig, LossConfig, MonitorConfig, OptimConfig
from mmqk.data.config import DataConfig, data_identity
from mmqk.model.config import ModelConfig
from mmqk.store import AlarmConfig, identity_hash

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "loss": LossConfig,
    "optim": OptimConfig,
    "monitor": MonitorConfig,
    "checkpoint": CheckpointConfig,
    "alarm": AlarmConfig,
}

# Fields that later versions of mmqk added. A field at its default is not part of a run's identity, so the ids of
# earlier runs stay valid.
NEWER = {
    "model": (
        "attn_gate", "attn_sink", "head_scale", "mlp_clamp", "mlp_norm", "residual_gate", "depth_scale", "embed_norm",
        "deep_norm", "separate_first", "separate_last",
    ),
    "monitor": ("matrices", "second_moment"),
    "optim": ("matrices", "update_clip", "adagc", "skip_step", "msign_every"),
    "alarm": ("stop_diverged",),
}  # fmt: skip


@dataclass(frozen=True)
class RunConfig:
    """The resolved configuration of a run.

    Attributes:
        trainer: the fields of `TrainerConfig`, as arguments of Lightning's Trainer.
        logging: names of the loggers besides metrics.jsonl; not part of the identity.
        identity: the fields that identify the run (see `mmqk.store.identity`), as plain data.
        out: the run folder.
        fork: the checkpoint and the changes that a fork starts with; None for a run from initial weights.
    """

    model: ModelConfig
    data: DataConfig
    loss: LossConfig
    optim: OptimConfig
    monitor: MonitorConfig
    checkpoint: CheckpointConfig
    alarm: AlarmConfig
    backend: str
    compile: bool
    activation_checkpointing: bool
    seed: int
    threads: int
    logging: list[str]
    trainer: dict[str, Any]
    out: Path
    identity: dict[str, Any]
    quiet: bool = False
    fork: ForkConfig | None = None

    @property
    def id(self) -> str:
        return identity_hash(self.identity)

    @property
    def processes(self) -> int:
        """Number of processes that train the run."""
        return self.trainer["devices"] * self.trainer["num_nodes"]

    @property
    def ranks(self) -> dict[str, Any]:
        """Strategy and number of processes; a resume with the same strategy and number is exact."""
        return {"strategy": self.trainer["strategy"], "processes": self.processes}

    def nested(self) -> dict[str, Any]:
        """Return the configuration as plain data; the parser accepts it as ``--config``."""
        plain: dict[str, Any] = {name: asdict(getattr(self, name)) for name in SECTIONS}
        others = ("backend", "compile", "activation_checkpointing", "seed", "threads", "logging")
        plain |= {name: getattr(self, name) for name in others}
        plain["trainer"] = dict(self.trainer)
        return plain if self.fork is None else {**plain, **self.fork.flags()}

    def record(self) -> dict[str, Any]:
        """Return the id and configuration that a checkpoint stores, for forks."""
        flags = {} if self.fork is None else self.fork.flags()
        return {"id": self.id, "config": {k: v for k, v in self.nested().items() if k not in flags}}


def identity_of(
    sections: dict[str, Any],
    trainer: TrainerConfig,
    *,
    backend: str,
    compile: bool,
    seed: int,
    fork: ForkConfig | None = None,
) -> dict[str, Any]:
    """Return the fields that identify a run, as plain data.

    Raises:
        UserError: a source of the data is missing or damaged.
    """
    identity: dict[str, Any] = {
        name: asdict(sections[name]) for name in ("model", "loss", "optim", "monitor", "alarm")
    }
    for section, names in NEWER.items():
        for f in fields(SECTIONS[section]):
            if f.name in names and identity[section][f.name] == f.default:
                del identity[section][f.name]
    if sections["optim"].schedule_steps in (None, trainer.max_steps):  # null means max_steps
        del identity["optim"]["schedule_steps"]
    if sections["loss"].chunk_size is None:
        del identity["loss"]["chunk_size"]
    if compile:  # fused operations round differently
        identity["compile"] = True
    if not sections["alarm"].acts:  # alarms that only report do not change the run
        del identity["alarm"]
    identity["data"] = data_identity(sections["data"])
    identity |= {"backend": backend, "seed": seed}
    identity["trainer"] = {name: getattr(trainer, name) for name in IN_IDENTITY}
    if trainer.deterministic:  # deterministic kernels sum in another order
        identity["trainer"]["deterministic"] = True
    if fork is not None:
        identity["fork"] = fork.identity
    return identity


def print_yaml(run: RunConfig) -> str:
    """Return the resolved configuration as YAML."""
    return yaml.safe_dump(run.nested(), sort_keys=False, allow_unicode=True)
