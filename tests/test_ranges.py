"""Every number of every configuration has a range and is refused outside it; the numbers are found by a search over
all fields."""

from __future__ import annotations

import ast
import importlib
import math
import typing
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import mmqk
from mmqk.config import SECTIONS, resolve
from mmqk.config.parse import Loader, read_yaml
from mmqk.config.run import Given
from mmqk.lab.grid.arms import ArmFile, ArmFork, GridFile, LrRule
from mmqk.lab.grid.claims import Claim, read_claims
from mmqk.model.ranges import Range, number, range_of
from mmqk.store import UserError

PACKAGE = Path(mmqk.__file__).parent
CLAIM = {"id": "C", "statement": "s", "treatment": "a", "control": "b", "min_effect": 1.0}


def claim(**values: Any) -> Claim:
    """Return the claim `CLAIM` with these fields changed, read by `read_claims` like the claims of a grid."""
    return read_claims([{**CLAIM, **values}], ("a", "b"), "g", "g")[0]


# How to build the classes whose names do not end with Config, or that need arguments.
BUILT = {
    Claim: claim,
    Given: Given,
    ArmFork: ArmFork,
    ArmFile: ArmFile,
    GridFile: lambda **values: GridFile(**{"name": "g", "base": "b", "arms": {"a": None}, **values}),
    LrRule: lambda **values: LrRule(**{"grid": (0.1,), "seeds": (0,), "metric": "m", **values}),
}


def configs() -> list[type]:
    """Return every dataclass of mmqk whose name ends with Config, found in the source, and the classes of `BUILT`."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(["mmqk", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Config") and node.decorator_list:
                found.append(getattr(importlib.import_module(module), node.name))
    return [kind for kind in found if is_dataclass(kind) and kind.__name__ != "RunConfig"] + list(BUILT)


def is_number(hint: Any) -> bool:
    """Return whether a type, or a type inside it, is int or float."""
    return hint in (int, float) or any(is_number(inner) for inner in typing.get_args(hint))


def numbers_of(kind: type) -> list[str]:
    hints = typing.get_type_hints(kind)
    return [f.name for f in fields(kind) if is_number(hints[f.name])]


def without_range(kind: type) -> list[str]:
    declared = {f.name: f for f in fields(kind)}
    return [n for n in numbers_of(kind) if range_of(declared[n]) is None]


CONFIGS = configs()
NUMBERS = [(kind, name) for kind in CONFIGS for name in numbers_of(kind)]


def wrapped(kind: type, name: str, value: Any) -> Any:
    """Return a value in the shape of its field: a mapping, a list, a tuple or the value itself."""
    hint = typing.get_type_hints(kind)[name]
    origin = typing.get_origin(hint)
    if origin in (list, tuple):
        return origin([value])
    if origin is not None and issubclass(origin if isinstance(origin, type) else object, typing.Mapping):
        return {"text": value}
    return value


def outside(wanted: Range) -> list[Any]:
    """Return numbers outside the range, and values that are not numbers."""
    below = wanted.low - max(1, abs(wanted.low))
    bad = [math.nan, math.inf, -math.inf, -1e300, 1e300, 10**400, wanted.high * 3 + 1, below]
    if wanted.zero:
        bad.remove(below)
    if isinstance(wanted.low, float) and wanted.low > 0:
        bad.append(5e-324)
    return [*bad, True, "wide"]


# By introspection ------------------------------------------------------------------------------------------


def test_every_number_has_a_range():
    assert len(CONFIGS) > 15 and {*SECTIONS.values()} <= {*CONFIGS} and len(NUMBERS) > 90
    assert {kind.__name__: bare for kind in CONFIGS if (bare := without_range(kind))} == {}


def test_a_new_field_without_a_range_is_found():
    """The control: `without_range` finds the fields without a range."""

    @dataclass
    class NewConfig:
        given: int = number(1, 0, 2)
        plain: int = 1
        maybe: float | None = None
        many: dict[str, float] = number(dict, 0.0, 1.0)
        words: str = ""
        on: bool = False

    globals()["NewConfig"] = NewConfig
    assert numbers_of(NewConfig) == ["given", "plain", "maybe", "many"]
    assert without_range(NewConfig) == ["plain", "maybe"]


@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_a_number_outside_its_range_is_one_sentence_where_its_dataclass_is_built(kind, name):
    build = BUILT.get(kind, kind)
    declared = {f.name: f for f in fields(kind)}[name]
    wanted = range_of(declared)
    build()  # the control: the default is inside its range
    for value in outside(wanted):
        if value == "wide" and isinstance(declared.default, str):
            continue  # model.attn_scale accepts words, which have their own check
        if declared.default is math.nan and value is math.nan:
            continue  # in a claim NaN means "not given"; a grid file cannot contain it
        with pytest.raises((ValueError, UserError)) as said:
            build(**{name: wrapped(kind, name, value)})
        sentence = str(said.value)
        assert name in sentence and len(sentence) < 250 and "\n" not in sentence, (value, sentence)


# Command line and files ------------------------------------------------------------------------------------


def test_numbers_in_files_are_decimal(tmp_path):
    """YAML 1.1 converts values such as 0x10 and 1:30 to other numbers without a message. In the files of runs and
    grids these values are text, which a field for numbers refuses."""
    text = "a: [0x10, 010, 1:30, 0b1, 12, 1_000, 1.5e+3, -2, 0, .5, .inf]\n"
    assert yaml.safe_load(text)["a"][:4] == [16, 8, 90, 1]
    read = yaml.load(text, Loader=Loader)["a"]
    assert read == ["0x10", "010", "1:30", "0b1", 12, 1000, 1500.0, -2, 0, 0.5, math.inf]
    (tmp_path / "run.yaml").write_text("optim: {warmup_steps: 0x10}\n")
    with pytest.raises(UserError, match=r"optim\.warmup_steps is '0x10': it must be a valid integer"):
        resolve([f"--config={tmp_path / 'run.yaml'}"])
    (tmp_path / "run.yaml").write_text("optim: {warmup_steps: 16, lr: 1e-3}\n")
    assert resolve([f"--config={tmp_path / 'run.yaml'}"]).optim.lr == 1e-3
    (tmp_path / "grid.yaml").write_text("seeds: [0x10]\n")
    assert read_yaml(tmp_path / "grid.yaml", "grid", "") == {"seeds": ["0x10"]}
