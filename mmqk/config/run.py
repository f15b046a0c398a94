"""What a run is: its resolved configuration, its identity and its record."""

from __future__ import annotations

from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class RunConfig:
    """A resolved run: every section, Trainer's flags, and where it goes.

    Attributes:
        trainer: the fields of `TrainerConfig`, as Lightning takes them.
        identity: the fields that make it this run and no other (see `mmqk.store.identity`); plain data.
        out: the run folder.
        fork: what the run starts from where it starts from another one's checkpoint.
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
    recompute: bool
    seed: int
    threads: int
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
        """How many train it together."""
        return self.trainer["devices"] * self.trainer["num_nodes"]

    @property
    def ranks(self) -> dict[str, Any]:
        """How many processes, and how; a resume is exact among the same."""
        return {"strategy": self.trainer["strategy"], "processes": self.processes}

    def nested(self) -> dict[str, Any]:
        """The configuration as plain data, which the parser reads back as ``--config``."""
        plain: dict[str, Any] = {name: asdict(getattr(self, name)) for name in SECTIONS}
        plain |= {
            name: getattr(self, name) for name in ("backend", "compile", "recompute", "seed", "threads")
        }
        plain["trainer"] = dict(self.trainer)
        return plain if self.fork is None else {**plain, **self.fork.flags()}

    def record(self) -> dict[str, Any]:
        """What a checkpoint says of the run that wrote it, for forks."""
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
    """The fields that make a run the run that it is, as plain data.

    Raises:
        UserError: a source of the data is missing or damaged.
    """
    identity: dict[str, Any] = {
        name: asdict(sections[name]) for name in ("model", "loss", "optim", "monitor")
    }
    if sections["optim"].schedule_steps in (None, trainer.max_steps):  # two ways to say the same
        del identity["optim"]["schedule_steps"]
    if sections["loss"].chunk is None:
        del identity["loss"]["chunk"]
    if compile:  # fused operations round otherwise
        identity["compile"] = True
    if sections["alarm"].acts:  # one that only reports changes nothing in the run
        identity["alarm"] = asdict(sections["alarm"])
    identity["data"] = data_identity(sections["data"])
    identity |= {"backend": backend, "seed": seed}
    identity["trainer"] = {name: getattr(trainer, name) for name in IN_IDENTITY}
    if trainer.deterministic:  # other kernels, and their sums in another order
        identity["trainer"]["deterministic"] = True
    if fork is not None:
        identity["fork"] = fork.identity
    return identity


def print_yaml(run: RunConfig) -> str:
    """The resolved configuration as YAML."""
    return yaml.safe_dump(run.nested(), sort_keys=False, allow_unicode=True)
