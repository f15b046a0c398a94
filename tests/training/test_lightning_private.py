"""Private parts of Lightning are used in one file only, and exist in the installed version."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.strategies import ModelParallelStrategy

ROOT = Path(__file__).parents[2]
ALLOWED = "mmqk/training/ranks.py"
FILES = [path for path in sorted((ROOT / "mmqk").rglob("*.py")) if path.relative_to(ROOT).as_posix() != ALLOWED]
# Names that refer to an object of Lightning.
HOLDERS = {
    *("trainer", "pl_module", "strategy", "launcher", "environment", "fit_loop", "epoch_loop", "lightning_module"),
    *("optimizer", "logger", "precision_plugin", "checkpoint_io"),
}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_access(source: str) -> list[str]:
    """Return each private attribute of an object of Lightning, and each private import, in the source of a file."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and private(node.attr):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if name in HOLDERS:
                found.append(f"{name}.{node.attr}")
        elif isinstance(node, ast.ImportFrom | ast.Import):
            module = getattr(node, "module", "") or ""
            for alias in node.names:
                path = f"{module}.{alias.name}".strip(".")
                if re.match(r"(lightning|pytorch_lightning)\b", path) and any(map(private, path.split("."))):
                    found.append(path)
    return found


def inherited(module: object) -> list[str]:
    """Return each private name that a class of the module shares with the class of Lightning that it extends."""
    found = []
    for own in vars(module).values():
        if not inspect.isclass(own) or own.__module__ != module.__name__:  # type: ignore[attr-defined]
            continue
        bases = [base for base in own.__mro__ if base.__module__.startswith(("lightning.", "pytorch_lightning."))]
        used = set(re.findall(r"self\.(_[a-z]\w*)", inspect.getsource(own)))
        theirs = {name for base in bases for name in re.findall(r"self\.(_[a-z]\w*)", inspect.getsource(base))}
        found += [f"{own.__name__}.{name}" for name in sorted(used & theirs)]
    return found


def test_no_other_file_touches_a_private_part():
    assert {path.name: private_access(path.read_text()) for path in FILES if private_access(path.read_text())} == {}


def test_no_class_shares_a_private_name_with_its_base():
    extending = [path for path in FILES if re.search(r"^\s*(import|from) lightning", path.read_text(), re.MULTILINE)]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in extending]
    assert "mmqk.training.ranks" in modules
    assert [name for module in modules for name in inherited(importlib.import_module(module))] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("self.trainer._signal_connector.x()", ["trainer._signal_connector"]),
        ("trainer.fit_loop.epoch_loop._x = 1", ["epoch_loop._x"]),
        ("from lightning.pytorch.loops.utilities import _select", ["lightning.pytorch.loops.utilities._select"]),
        ("import lightning.pytorch._graveyard", ["lightning.pytorch._graveyard"]),
        ("self._records; trainer.global_step; batch._map(f); __main__.__spec__", []),
    ],
)
def test_a_planted_access_is_found(source, found):
    assert private_access(source) == found


def test_a_planted_class_is_found(tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text(
        "from lightning.pytorch.strategies import ModelParallelStrategy\n"
        "class Planted(ModelParallelStrategy):\n"
        "    def setup_environment(self):\n"
        "        self._own = self._setup_distributed()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert inherited(importlib.import_module("planted")) == ["Planted._setup_distributed"]


def test_the_private_parts_exist():
    """Another version of Lightning may rename a private part; assigning to the old name would then have no effect."""
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    assert callable(trainer._signal_connector.register_signal_handlers)
    assert callable(trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor)
    assert callable(ModelParallelStrategy._setup_distributed)
    assert importlib.import_module("lightning.pytorch.trainer.connectors.checkpoint_connector")
