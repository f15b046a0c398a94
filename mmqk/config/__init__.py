"""One parser: YAML files and command line -> frozen dataclasses, and the identity of a run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from dataclasses import asdict, dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentError, Namespace
from jsonargparse import _loaders_dumpers as loaders
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from mmqk.config.processes import DEVICES, NODES, STRATEGIES, check_sharded, world_size
from mmqk.config.sentences import OWN_TRAINER_FLAGS, class_path_sentence, sentence_of
from mmqk.data.config import DataConfig, data_identity, layout
from mmqk.model import BACKENDS, ModelConfig, check_backend
from mmqk.monitors import MonitorConfig
from mmqk.ranges import MOST_SEED, MOST_STEPS, Range, decimal_numbers
from mmqk.store import AlarmConfig, UserError, identity_hash, with_dashes
from mmqk.training.fork.parent import ForkConfig, Parent, base_of, check_forkable, read_parent
from mmqk.training.loop.device import check_shown, is_masked
from mmqk.training.loop.step_log import CheckpointConfig
from mmqk.training.step.losses import LossConfig
from mmqk.training.step.optimizers import OptimConfig
from mmqk.training.step.qk_clip import check_qk_clip

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "loss": LossConfig,
    "optim": OptimConfig,
    "monitor": MonitorConfig,
    "checkpoint": CheckpointConfig,
    "alarm": AlarmConfig,
}
# Trainer's flags that --help shows; --help-all shows every one.
SHOWN_TRAINER_FLAGS = (
    "accelerator", "devices", "num_nodes", "strategy", "max_steps", "precision", "accumulate_grad_batches",
    "gradient_clip_val",
)  # fmt: skip
# Trainer's flags that are a word here, and an object of a class in Lightning too: type, default, help.
WORDS_OF_TRAINER: dict[str, tuple[Any, str | None, str]] = {
    "accelerator": (str, "auto", "cpu, gpu, mps or auto: a GPU where there is one."),
    "strategy": (str, "auto", f"How several processes train together: {', '.join(STRATEGIES)}."),
    "profiler": (
        Literal["simple", "advanced", "pytorch"] | None,
        None,
        "Lightning's table of times, printed at the end.",
    ),
}
IDENTITY_TRAINER_FLAGS = ("max_steps", "precision", "accumulate_grad_batches", "gradient_clip_val")
# The numbers that are no field of a section.
RANGES = {
    "seed": Range(0, MOST_SEED),
    "threads": Range(0, 1024),
    "trainer.max_steps": Range(1, MOST_STEPS),
    "trainer.accumulate_grad_batches": Range(1, 2**24),
    "trainer.gradient_clip_val": Range(1e-12, 1e12, zero=True),
    "trainer.devices": DEVICES,
    "trainer.num_nodes": NODES,
}
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


@dataclass(frozen=True)
class RunConfig:
    """A resolved run: every section, Trainer's flags, and where it goes.

    Attributes:
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


# jsonargparse reads every file and every value with this loader.
loaders.yaml_default_loader = decimal_numbers(loaders.get_yaml_default_loader())


class Parser(LightningArgumentParser):
    """Raises what argparse would print and exit on, so that a mistake is one sentence."""

    def error(self, message: str, ex: Exception | None = None) -> None:  # type: ignore[override]
        raise UserError(sentence_of(message, self)) from ex


def build_parser(help_all: bool = False) -> Parser:
    """The parser of ``mmqk.train``; ablations resolve their arms with the same one."""
    parser = Parser(
        prog="python -m mmqk.train",
        description="Train one run. Everything it measures goes to the run folder: config.yaml, metrics.jsonl,"
        " status.json, TensorBoard events and checkpoints/. The same command again resumes it.",
        usage="python -m mmqk.train [--config YAML] [--FIELD VALUE ...]",
        epilog="Example: python -m mmqk.train --config configs/demo.yaml --optim.lr 0.03 --model.qk_norm.kind rms",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="YAML file of a run; repeat it to merge several.")
    parser.add_argument("--help-all", action="store_true", help="Show Trainer's flags too, and exit.")
    parser.add_argument("--out", type=str, default=None, help="Run folder (default: runs/NAME/<id>).")
    parser.add_argument("--seed", type=int, default=0, help="Of initial weights, dropout and data order.")
    parser.add_argument(
        "--backend", type=str, default="sdpa", help=f"Attention backend: {', '.join(BACKENDS)}."
    )
    parser.add_argument(
        "--compile", type=bool, default=False,
        help="Compile blocks, norms and loss (torch.compile): a run starts later, and its steps are fused; for GPUs.",
    )  # fmt: skip
    parser.add_argument(
        "--recompute", type=bool, default=False,
        help="Forget each block's activations and compute them again in the backward pass: less memory, more work.",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default 0: torch's own choice).")
    parser.add_argument(
        "--fork", type=str, default=None, metavar="CKPT",
        help="Go on from this checkpoint (or the newest of a run folder) with its run's configuration, of which only"
        " the fields given here differ.",
    )  # fmt: skip
    parser.add_argument("--fork_skip", type=int, default=0, help="Of a fork: leave out the next N batches.")
    perturb = "Of a fork: change each weight matrix by a random one of this share of its RMS."
    parser.add_argument("--fork_perturb", type=float, default=0.0, help=perturb)
    parser.add_argument("--fork_draw", type=int, default=0, help="Of a fork: number of that random change.")
    parser.add_argument("--quiet", action="store_true", help="Print one line: how the run ended and where.")
    for name, section in SECTIONS.items():
        parser.add_class_arguments(section, name)
    taken = OWN_TRAINER_FLAGS | WORDS_OF_TRAINER.keys()
    skipped = taken & signature(Trainer).parameters.keys()  # Trainer's flags differ by version
    parser.add_class_arguments(Trainer, "trainer", skip=skipped, fail_untyped=False)
    for flag, (kind, default, what) in WORDS_OF_TRAINER.items():
        parser.add_argument(f"--trainer.{flag}", type=kind, default=default, help=what)
    defaults = {"max_steps": 1000, "devices": 1, "gradient_clip_val": 1.0, "precision": "32-true"}
    parser.set_defaults({f"trainer.{flag}": value for flag, value in defaults.items()})
    for action in parser._actions:
        flag = action.dest.removeprefix("trainer.")
        if flag != action.dest and not (help_all or flag in SHOWN_TRAINER_FLAGS):
            action.help = argparse.SUPPRESS
    return parser


def resolve(argv: list[str], parent: Parent | None = None) -> RunConfig:
    """Parse, check and complete a command line of ``mmqk.train``.

    Args:
        argv: the command line.
        parent: what the run is forked from, where its checkpoint does not exist yet; else ``--fork`` says it.

    Raises:
        UserError: an unknown field, a wrong type, an impossible value, data and tokenizers that are missing, or a
            fork that cannot be.
        SystemExit: after printing help.
    """
    if "--help-all" in argv:
        build_parser(help_all=True).parse_args(["--help"])
    parsed = _parse(argv)
    details = {name: getattr(parsed, f"fork_{name}") for name in ("skip", "perturb", "draw")}
    if parent is None and parsed.fork is None:
        for name, value in details.items():
            if value:
                raise UserError(f"fork_{name} belongs to a fork: name its checkpoint with --fork.")
        return _complete(parsed)
    checkpoint = None
    if parent is None:
        checkpoint, parent = read_parent(parsed.fork, parsed.out)
    try:
        fork = ForkConfig(parent, parsed.fork or "", checkpoint, **details)
    except ValueError as error:
        raise UserError(str(error)) from error
    return _complete(_parse(["--config", json.dumps(base_of(parent)), *argv]), fork)


def _parse(argv: list[str]) -> Namespace:
    parser = build_parser()
    try:
        return parser.parse_args(with_dashes(parser, argv))
    except ArgumentError as error:
        raise UserError(sentence_of(str(error), parser)) from error
    except OverflowError as error:
        long = next((word for word in argv if re.search(r"\d{300}", word)), "A field")
        raise UserError(
            f"{long.split('=')[0].lstrip('-')} has a number of hundreds of digits: write a smaller one."
        ) from error


def _complete(parsed: Namespace, fork: ForkConfig | None = None) -> RunConfig:
    trainer = dict(vars(parsed.trainer))
    _check_ranges(parsed)
    for flag in WORDS_OF_TRAINER:
        if "class_path" in str(trainer[flag]):
            raise UserError(class_path_sentence(f"trainer.{flag}"))
    if trainer["precision"] not in PRECISIONS:
        raise UserError(
            f"trainer.precision is '{trainer['precision']}': choose one of {', '.join(PRECISIONS)}."
        )
    if trainer.get("deterministic") == "warn":
        raise UserError(
            "trainer.deterministic warn leaves attention as it is: set it to true, or leave it out."
        )
    try:
        world = world_size(trainer)
        sections = {name: _build(section, getattr(parsed, name), name) for name, section in SECTIONS.items()}
        blocks = layout(sections["data"]).blocks
        given = sections["model"].blocks
        if given and given != blocks:
            raise UserError(
                f"model.blocks {given} does not match the data, whose vocabulary has {blocks}: leave model.blocks"
                " out, or set --data.tokenizers."
            )
        sections["model"] = dataclasses.replace(sections["model"], blocks=blocks)
        _check_trained(sections["loss"], sections["data"], sections["model"])
        _check_batches(sections["monitor"], sections["data"], trainer["accumulate_grad_batches"], world)
        model = sections["model"]
        if fork is not None:
            check_forkable(ModelConfig.from_dict(fork.parent.config["model"]), model)
        check_backend(
            parsed.backend,
            model.attn_softcap,
            model.attention,
            dropout=model.attn_dropout,
            masked=is_masked(model, sections["data"]),
            tokens=sections["data"].seq_len,
        )
        check_qk_clip(sections["optim"], model)
        check_shown(parsed.compile, parsed.recompute, parsed.backend, sections["optim"])
        if trainer["strategy"] == "fsdp":
            check_sharded(model, sections["optim"], sections["loss"], sections["monitor"])
        _check_steps(trainer["max_steps"], sections["checkpoint"].at, fork)
    except ValueError as error:
        raise UserError(str(error)) from error
    identity: dict[str, Any] = {
        name: asdict(sections[name]) for name in ("model", "loss", "optim", "monitor")
    }
    if sections["optim"].schedule_steps in (None, trainer["max_steps"]):  # two ways to say the same
        del identity["optim"]["schedule_steps"]
    if sections["loss"].chunk is None:
        del identity["loss"]["chunk"]
    if parsed.compile:  # fused operations round otherwise
        identity["compile"] = True
    if sections["alarm"].acts:  # one that only reports changes nothing in the run
        identity["alarm"] = asdict(sections["alarm"])
    identity["data"] = data_identity(sections["data"])
    identity |= {"backend": parsed.backend, "seed": parsed.seed}
    identity["trainer"] = {flag: trainer[flag] for flag in IDENTITY_TRAINER_FLAGS}
    if trainer.get("deterministic"):  # other kernels, and their sums in another order
        identity["trainer"]["deterministic"] = True
    if fork is not None:
        identity["fork"] = fork.identity
    files = [str(path) for path in parsed.config or [] if path is not None]  # None: a parent's
    name = Path(files[-1]).stem if files else "run" if fork is None else "fork"
    out = Path(parsed.out) if parsed.out else Path("runs") / name / identity_hash(identity)
    return RunConfig(
        **sections,
        backend=parsed.backend,
        compile=parsed.compile,
        recompute=parsed.recompute,
        seed=parsed.seed,
        threads=parsed.threads,
        trainer=trainer,
        out=out,
        identity=identity,
        quiet=parsed.quiet,
        fork=fork,
    )


def _check_ranges(parsed: Namespace) -> None:
    """The numbers that are no field of a section; devices and nodes, which may be text, wait for `world_size`."""
    for name, wanted in RANGES.items():
        value = parsed[name]
        if value is not None and wanted not in (DEVICES, NODES):
            try:
                wanted.check(name, value)
            except ValueError as error:
                raise UserError(str(error)) from error


def _check_trained(loss: LossConfig, data: DataConfig, model: ModelConfig) -> None:
    """Raise ValueError where no token of the data has a loss."""
    loss.weights_of(model.modalities)
    kinds = {kind for kind, weight in data.mix.items() if weight > 0}
    if kinds == {"text"} and loss.weights.get("text") == 0:
        raise ValueError(
            "loss.weights.text is 0 and data.mix has only text, which trains nothing: raise the weight or add another"
            " kind to data.mix."
        )


def _check_steps(max_steps: int, at: list[int], fork: ForkConfig | None) -> None:
    start = 0 if fork is None else fork.parent.step
    if start >= max_steps:
        raise UserError(
            f"trainer.max_steps is {max_steps}, but the fork starts at step {start}: give it more, and"
            " optim.schedule_steps if the schedule is to stay."
        )
    for step in at:
        if not start < step <= max_steps:
            raise UserError(
                f"checkpoint.at has step {step}: the run's own steps are {start + 1} to {max_steps}."
            )


def _check_batches(monitor: MonitorConfig, data: DataConfig, accumulate: int, world: int) -> None:
    if data.batch_size % (accumulate * world):
        over = f" times {world} processes" if world > 1 else ""
        raise UserError(
            f"data.batch_size {data.batch_size} is not a multiple of trainer.accumulate_grad_batches"
            f" {accumulate}{over}: choose one that is."
        )
    room = data.val_sequences if monitor.batch == "heldout" else data.batch_size // accumulate
    if monitor.sequences > room:
        what = "held-out sequences" if monitor.batch == "heldout" else "sequences of a micro-batch"
        raise UserError(f"monitor.sequences {monitor.sequences} is more than the {room} {what}: lower it.")
    if monitor.gradient_agreement and data.batch_size // (accumulate * world) < 2:
        raise UserError(
            "monitor.gradient_agreement needs two sequences in a micro-batch of each process: raise data.batch_size"
            " or leave it off."
        )


def _build(section: type, values: Any, path: str) -> Any:
    """A frozen dataclass from the parser's namespace, nested ones included; it checks itself."""
    plain = vars(values) if isinstance(values, Namespace) else values
    if not isinstance(plain, dict) or any(f.name not in plain for f in dataclasses.fields(section)):
        raise ValueError(
            f"{path} is not one value: it is a group of fields; set one of them, as --help lists them."
        )
    built = {}
    for f in dataclasses.fields(section):
        value = plain[f.name]
        nested = f.default_factory if isinstance(f.default_factory, type) else None
        if nested is not None and dataclasses.is_dataclass(nested):
            value = _build(nested, value, f"{path}.{f.name}")
        elif isinstance(value, Namespace):
            value = vars(value)
        built[f.name] = value
    return section(**built)


def print_yaml(run: RunConfig) -> str:
    """The resolved configuration as YAML."""
    return yaml.safe_dump(run.nested(), sort_keys=False, allow_unicode=True)
