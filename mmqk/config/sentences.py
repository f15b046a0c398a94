"""Converts each error message of jsonargparse to one plain sentence."""

from __future__ import annotations

import difflib
import re
from typing import get_origin

from jsonargparse import ArgumentParser

from mmqk.ranges import shortened
from mmqk.store import flatten

# Fields of Lightning's Trainer that mmqk sets, or that would change a run without changing its configuration.
OWN_TRAINER_FLAGS = {
    "logger", "callbacks", "max_epochs", "min_epochs", "min_steps", "max_time", "default_root_dir",
    "enable_checkpointing", "enable_progress_bar", "num_sanity_val_steps", "use_distributed_sampler",
    "reload_dataloaders_every_n_epochs", "log_every_n_steps", "enable_model_summary", "fast_dev_run",
    "overfit_batches", "limit_train_batches", "limit_val_batches", "limit_test_batches",
    "limit_predict_batches", "val_check_interval", "check_val_every_n_epoch", "gradient_clip_algorithm",
    "plugins", "barebones", "model_registry", "sync_batchnorm",
}  # fmt: skip
MOST_NAMED = 4  # fields in a suggestion
_KINDS = {
    "int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "dict": "a mapping",
    "list": "a list", "tuple": "a list", "NoneType": "null",
}  # fmt: skip


def sentence_of(message: str, parser: ArgumentParser) -> str:
    """Return jsonargparse's message as one sentence that names the field and the most similar known field."""
    flat = " ".join(message.split())
    if named := re.search(r'Parser key "(trainer\.\w+)".*class_path', flat):
        return class_path_sentence(named[1])
    if unknown := re.search(r"[Uu]nrecognized arguments?: (\S+)", flat):
        return _unknown(unknown[1].lstrip("-").split("=")[0], parser)
    if nested := re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", flat):
        return _unknown(f"{nested[1]}.{nested[2]}", parser)
    if top := re.search(r"Option '([\w.]+)' is not accepted", flat):
        return _unknown(top[1], parser)
    if group := re.search(r"Parser key \"([\w.]+)\": Unable to load config '(.*?)'", flat):
        return f"{group[1]} is a group of fields, not {shortened(group[2])}: set one of them, as --help lists them."
    if "Unexpected config:" in flat:
        return "This config sets no field: give a YAML mapping of fields to values."
    if broken := re.search(r"Problems parsing config: (.*)", flat):
        return f"This is not the YAML of a run ({broken[1]}): check the path."
    if union := re.search(r'Parser key "([\w.]+)": Does not validate .*?Subtypes: \[(.*?)\] Errors', flat):
        value = re.search(r"Given value: (.*)", flat)
        given = shortened(value[1]) if value else "'?'"
        expected = f"expected {_kinds(union[2]).replace('], ', '] or ')}"
        expected = expected if len(expected) < 100 else "--help lists its types"
        return f"{union[1]} is {given}, which is of the wrong type: {expected}."
    if wrong := re.search(r'Parser key "([\w.]+)": Expected an? (.+?)\. Got value: (.*)', flat):
        kind = _kinds(wrong[2])
        types = (getattr(action, "_typehint", None) for action in parser._actions if action.dest == wrong[1])
        inside = get_origin(next(types, None)) in (dict, list, tuple) and kind not in ("a mapping", "a list")
        return f"{wrong[1]} {'has' if inside else 'is'} {shortened(wrong[3])}: expected {kind}."
    if missing := re.search(r"config\"?: Path is not a file: '(.+?)'|([\w./-]+\.ya?ml)", flat):
        return f"The configuration {missing[1] or missing[2]} cannot be read: check the path after --config."
    return flat[:400]


def _kinds(types: str) -> str:
    """Convert jsonargparse's name of a type to words: ``<class 'int'>`` to ``a whole number``."""
    named = re.sub(r"<class '(\w+)'>", lambda m: _KINDS.get(m[1], m[1]), types)
    return named.replace("typing.Literal", "one of ")


def class_path_sentence(field: str) -> str:
    """Return why a class path is refused."""
    return f"{field} names a class, which mmqk does not accept: give a plain value, or leave it out."


def _unknown(name: str, parser: ArgumentParser) -> str:
    flag = name.removeprefix("trainer.").split(".")[0].rstrip("+")
    if name.startswith("trainer.") and flag in OWN_TRAINER_FLAGS:
        return f"mmqk sets trainer.{flag}: leave it out."
    fields = flatten(parser.get_defaults().as_dict())
    known = list(dict.fromkeys([*(action.dest for action in parser._actions), *fields]))
    if "." in name and name in known:
        return f"{name} has no value: write {name}=VALUE."
    if near := _most_similar(name, known):
        hint = f"did you mean {' or '.join(repr(field) for field in near)}?"
    elif parser.add_help:
        hint = "python -m mmqk.train --help lists the fields."
    else:
        hint = f"use one of {', '.join(action.dest for action in parser._actions)}."
    return f"There is no field '{name}': {hint}"


def _most_similar(name: str, known: list[str]) -> list[str]:
    """Return the fields that end with a name (``lr``: optim.lr), or else the one field that is written like it."""
    plain = name.replace("-", "_")
    if (ends := [field for field in known if field.endswith(f".{plain}")]) and len(ends) <= MOST_NAMED:
        return ends
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.6):
        return near
    last = {field.rpartition(".")[2]: field for field in known}  # of several fields with this last part, the last
    return [last[leaf] for leaf in difflib.get_close_matches(plain, last, n=1, cutoff=0.75)]
