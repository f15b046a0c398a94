"""Parses YAML files and the command line into a `RunConfig`. The message of every user error is one sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import itertools
import json
import os
import re
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace
from jsonargparse import _loaders_dumpers as loaders

from mmqk.config.checks import (
    LOGGERS,
    check_batches,
    check_loggers,
    check_matrices,
    check_qk_clip,
    check_sharded,
    check_shown,
    check_steps,
    check_trained,
    is_masked,
)
from mmqk.config.fork import ForkConfig, Parent, base_of, check_forkable, read_parent
from mmqk.config.run import SECTIONS, RunConfig, identity_of
from mmqk.config.sentences import sentence_of
from mmqk.config.trainer import TrainerConfig
from mmqk.data.config import FOLDER_FIELDS, SOURCE_FIELDS, DataConfig, layout
from mmqk.model.backend_check import BACKENDS, check_backend
from mmqk.model.config import ModelConfig
from mmqk.ranges import MOST_SEED, Range, decimal_numbers
from mmqk.store import (
    OneSentenceParser,
    UserError,
    check_local,
    flatten,
    identity_hash,
    read_utf8,
    with_configs,
    with_dashes,
)
from mmqk.store.shipped import CONFIGS, SHIPPED

T = TypeVar("T")
# Ranges of the numeric fields that belong to no section.
RANGES = {"seed": Range(0, MOST_SEED), "threads": Range(0, 1024)}

# jsonargparse reads every file and every value with this loader.
loaders.yaml_default_loader = decimal_numbers(loaders.get_yaml_default_loader())


class Parser(ArgumentParser):
    """Raises a UserError with one sentence where argparse would print its usage and exit."""

    def error(self, message: str, ex: Exception | None = None) -> None:  # type: ignore[override]
        raise UserError(sentence_of(message, self)) from ex


def build_parser() -> Parser:
    """Return the parser of ``mmqk.train``. ``mmqk.ablate`` uses it for the arms of a grid too."""
    return _built(OneSentenceParser.program or "python -m mmqk.train")


@lru_cache
def _built(program: str) -> Parser:
    # Cached, because building the parser takes half of the time of `resolve`, and a grid has hundreds of arms.
    parser = Parser(
        prog=program,
        description="Train one run. Everything it measures goes to the run folder: config.yaml, metrics.jsonl,"
        " status.json, TensorBoard events and checkpoints/. Run the same command again to resume.",
        usage="%(prog)s [--config YAML] [--FIELD VALUE ...]",
        epilog="Example: python -m mmqk.train --config configs/demo.yaml --optim.lr 0.03 --model.qk_norm.kind rms",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", action="config",
        help="YAML file of a run, or the name of a shipped one (demo); repeat it to merge several.",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=str, default=None,
        help="Run folder (default: runs/NAME/<id>; NAME is that of your configuration, else of your data, else of the"
        " shipped configuration).",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, default=0, help="Seed of initial weights, dropout and data order."
    )
    parser.add_argument(
        "--backend", type=str, default="sdpa", help=f"Attention backend: {', '.join(BACKENDS)}."
    )
    parser.add_argument(
        "--compile", type=bool, default=False,
        help="Compile blocks, norms and loss (torch.compile), for GPUs: faster steps after a slower start.",
    )  # fmt: skip
    parser.add_argument(
        "--activation_checkpointing", type=bool, default=False,
        help="Compute the activations of each block again in the backward pass: less memory, more computation.",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default 0: torch chooses).")
    parser.add_argument(
        "--logging", type=list[str], default=["tensorboard"], metavar="[NAME, ...]",
        help=f"Loggers besides metrics.jsonl: {', '.join(LOGGERS)} (default [tensorboard]).",
    )  # fmt: skip
    parser.add_argument(
        "--fork", type=str, default=None, metavar="CKPT",
        help="Start from this checkpoint (or the newest one of a run folder) with the configuration of its run; the"
        " fields given here replace those of that run.",
    )  # fmt: skip
    parser.add_argument("--fork_skip_batches", type=int, default=0, help="Fork: skip the next N batches.")
    perturb = "Fork: RMS of the noise that is added to each weight matrix, divided by the RMS of the matrix."
    parser.add_argument("--fork_noise", type=float, default=0.0, help=perturb)
    parser.add_argument("--fork_seed", type=int, default=0, help="Fork: seed of that noise.")
    moments = "Fork: start the optimizer without the moments of the parent."
    parser.add_argument("--fork_new_moments", type=bool, default=False, help=moments)
    parser.add_argument("--quiet", action="store_true", help="Print one line only: the status and the run folder.")
    for name, section in SECTIONS.items():
        parser.add_class_arguments(section, name)
    parser.add_class_arguments(TrainerConfig, "trainer")
    return parser


def resolve(argv: list[str], parent: Parent | None = None) -> RunConfig:
    """Parse, check and complete a command line of ``mmqk.train``.

    Args:
        argv: the command line; ``demo optim.lr=0.01`` is short for ``--config configs/demo.yaml --optim.lr=0.01``.
        parent: the parent of a fork whose checkpoint does not exist yet. If it is None and the run is a fork,
            ``--fork`` in ``argv`` gives the checkpoint.

    Raises:
        UserError: an unknown field, a wrong type, an impossible value, missing data or tokenizers, or an impossible
            fork.
        SystemExit: after printing help.
    """
    argv = with_configs(argv)
    parsed = _parse(argv, build_parser())
    details = {name: getattr(parsed, f"fork_{name}") for name in ("skip_batches", "noise", "seed", "new_moments")}
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
    return _complete(_parse(["--config", json.dumps(base_of(parent)), *argv], build_parser()), fork)


def defaults() -> dict[str, Any]:
    """Return the default of every field by dotted name. The entries of `model.vocab_sizes` have no default, because
    they come from the data."""
    return flatten(build_parser().get_defaults().as_dict())


def parse_fields(kind: type[T], argv: tuple[str, ...]) -> T:
    """Return a frozen dataclass from flags named like its fields. ``mmqk.ablate`` uses it for parts of a grid.

    Raises:
        UserError: an unknown field or a wrong type.
        ValueError: the dataclass refuses a value.
    """
    built: T = _cached(kind, argv)  # type: ignore[arg-type]
    return built


@lru_cache(maxsize=1024)
def _cached(kind: type, argv: tuple[str, ...]) -> Any:
    return kind(**vars(_parse(list(argv), _parser_of(kind))))


@lru_cache
def _parser_of(kind: type) -> Parser:
    parser = Parser(exit_on_error=False, allow_abbrev=False, add_help=False)
    parser.add_class_arguments(kind)
    return parser


def _parse(argv: list[str], parser: Parser) -> Namespace:
    words = with_dashes(parser, argv)
    pairs = ((*word.partition("=")[::2], after) for word, after in itertools.pairwise([*words, ""]))
    files = [path for flag, value, after in pairs if flag == "--config" and os.path.exists(path := value or after)]
    for path in files:
        # jsonargparse would accept a file of any length, and of a repeated key it would use the last value.
        _refuse_repeated_keys(path, read_utf8(Path(path), "check the path after --config"))
    try:
        return _parse_words(words, parser)
    except UserError as error:
        if named := next((path for path in files if _fails_alike(path, parser, error)), None):
            raise UserError(f"{named}: {error}") from error
        raise


def _fails_alike(path: str, parser: Parser, expected: UserError) -> bool:
    """Return whether the config file alone raises the error ``expected``."""
    try:
        _parse_words(["--config", path], parser)
    except UserError as error:
        return str(error) == str(expected)
    return False


def _parse_words(argv: list[str], parser: Parser) -> Namespace:
    try:
        return parser.parse_args(argv)
    except ArgumentError as error:
        raise UserError(sentence_of(str(error), parser)) from error
    except OverflowError as error:
        long = next((word for word in argv if re.search(r"\d{300}", word)), "A field")
        raise UserError(
            f"{long.split('=')[0].lstrip('-')} has a number of hundreds of digits: write a smaller one."
        ) from error


def _refuse_repeated_keys(path: str, text: str) -> None:
    with contextlib.suppress(yaml.YAMLError):  # the parser reports it
        nodes = [yaml.compose(text, Loader=yaml.SafeLoader)]
        for node in nodes:
            if isinstance(node, yaml.MappingNode):
                names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
                if twice := [name for i, name in enumerate(names) if name in names[:i]]:
                    raise UserError(f"{path}: the key {twice[0]!r} is written twice: remove one.")
                nodes += [value for _, value in node.value if value not in nodes]  # an alias may be recursive


def _complete(parsed: Namespace, fork: ForkConfig | None = None) -> RunConfig:
    _check_ranges(parsed)
    for name in ("compile", "activation_checkpointing", "backend", "logging", "quiet"):
        if parsed[name] is None:
            raise UserError(f"{name} is empty: give a value, or leave it out.")
    files = [str(path) for path in parsed.config or [] if path is not None]  # None: the parent's JSON, not a file
    _look_beside(files, parsed.data)
    try:
        trainer = _build(TrainerConfig, parsed.trainer, "trainer")
        sections = {name: _build(section, getattr(parsed, name), name) for name, section in SECTIONS.items()}
        vocab_sizes = layout(sections["data"]).vocab_sizes
        given = sections["model"].vocab_sizes
        if given and given != vocab_sizes:
            raise UserError(
                f"model.vocab_sizes is {given}, but the vocabulary of the data has {vocab_sizes}: leave"
                " model.vocab_sizes out, or set --data.tokenizers."
            )
        sections["model"] = dataclasses.replace(sections["model"], vocab_sizes=vocab_sizes)
        check_trained(sections["loss"], sections["data"], sections["model"])
        check_batches(
            sections["monitor"], sections["data"], trainer.accumulate_grad_batches, trainer.processes
        )
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
            sink=model.attn_sink,
        )
        check_qk_clip(sections["optim"], model)
        parent = None if fork is None else fork.parent.config["optim"].get("matrices", "adamw")
        check_matrices(sections["optim"], model, sections["monitor"], parent)
        check_shown(parsed.compile, parsed.activation_checkpointing, parsed.backend, sections["optim"])
        if trainer.strategy == "fsdp":
            check_sharded(model, sections["optim"], sections["loss"], sections["monitor"])
        check_steps(trainer.max_steps, sections["checkpoint"].at, fork)
        check_loggers(parsed.logging)
    except ValueError as error:
        raise UserError(str(error)) from error
    identity = identity_of(
        sections, trainer, backend=parsed.backend, compile=parsed.compile, seed=parsed.seed, fork=fork
    )
    check_local(parsed.out or "", "out", "name a local folder")
    name = _name_of(files, sections["data"]) if fork is None or files else "fork"
    out = Path(parsed.out) if parsed.out else Path("runs") / name / identity_hash(identity)
    return RunConfig(
        **sections,
        backend=parsed.backend,
        compile=parsed.compile,
        activation_checkpointing=parsed.activation_checkpointing,
        seed=parsed.seed,
        threads=parsed.threads,
        logging=list(dict.fromkeys(parsed.logging)),
        trainer=asdict(trainer),
        out=out,
        identity=identity,
        quiet=parsed.quiet,
        fork=fork,
    )


def _name_of(files: list[str], data: DataConfig) -> str:
    """Return the name of the folder of the run: that of the user's own configuration (of its project if the file is
    config.yaml), else of the user's own data, else of the shipped configuration."""
    shipped = (SHIPPED / CONFIGS[0]).resolve()
    for file in (Path(name).resolve() for name in reversed(files)):
        if not file.is_relative_to(shipped):
            is_project = file.stem == "config" and not (file.parent / "run.json").exists()
            return (file.parent.name if is_project else "") or file.stem
    kinds = ("tokens",) if "tokens" in data.family else data.sources
    for field in (FOLDER_FIELDS[kind] for kind in kinds):
        if (source := getattr(data, field)) != getattr(DataConfig, field):
            path = Path(source)
            while re.search(r"[*?\[{]", path.name):
                path = path.parent
            return path.absolute().name.removesuffix(".tar") or "run"
    return Path(files[-1]).stem if files else "run"


def _look_beside(files: list[str], data: Namespace) -> None:
    """Resolve relative data folders in a config file against the folder of the file, if they exist there."""
    for file in files:
        named = flatten(yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {})
        for name in (*SOURCE_FIELDS.values(), "tokens", "tokenizers"):
            path = named.get(f"data.{name}")
            if path and path == data[name] and _exists(str(Path(file).parent), str(path)):
                data[name] = os.path.normpath(Path(file).parent / path)


def _exists(folder: str, name: str) -> bool:
    """Return whether a folder has a path or a match of a pattern; for a pattern with braces, such as
    ``a/{00..09}.tar``, whether it has the folder of the pattern."""
    beside = os.path.join(folder, name)
    if "{" in name:
        return os.path.exists(os.path.dirname(beside))
    return os.path.exists(beside) or any(glob.iglob(os.path.join(glob.escape(folder), name), recursive=True))


def _check_ranges(parsed: Namespace) -> None:
    """Check the numeric fields that belong to no section."""
    for name, wanted in RANGES.items():
        try:
            wanted.check(name, parsed[name])
        except ValueError as error:
            raise UserError(str(error)) from error


def _build(section: type, values: Any, path: str) -> Any:
    """Build a frozen dataclass and its nested ones from the parser's namespace; each dataclass checks its fields."""
    plain = vars(values) if isinstance(values, Namespace) else values
    if plain is None:
        raise ValueError(f"{path} is empty: set one of its fields, or leave it out.")
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
        elif value is None and type(None) not in get_args(get_type_hints(section)[f.name]):
            raise ValueError(f"{path}.{f.name} is empty: give a value, or leave it out.")
        elif isinstance(value, Namespace):
            value = vars(value)
        built[f.name] = value
    return section(**built)
