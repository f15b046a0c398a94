"""Check your own model and batch before training: ``mmqk preflight train:checked``."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmqk.store import OneSentenceParser, UserError
from mmqk.store.errors import FAILED_EXIT

DESCRIPTION = """\
Check a model and a batch before training: leaks between tokens, attention, loss and parameters. Prints a line for
each check. The exit code is 1 if a check failed."""

EPILOG = """\
The function takes no arguments. It returns a dictionary with model and batch, and optionally loss, optimizer and
modality, or a tuple in this order (docs/check_your_model.md).

examples:
  mmqk preflight train:checked                     the function checked() in train.py
  mmqk preflight train:checked --json checks.json  also write the lines as JSON"""

NAMES = ("model", "batch", "loss", "optimizer", "modality")


def main(argv: list[str] | None = None) -> int:
    """Check what the function returns; return 1 if a check failed.

    Raises:
        UserError: the function does not exist or returns something else.
    """
    parser = OneSentenceParser(prog="mmqk preflight", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("function", metavar="module:function", help="a function without arguments")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the lines as JSON")
    options = parser.parse_args(argv)
    arguments = _called(options.function)

    from mmqk.monitors import preflight as check

    table = check(**arguments)
    print(table)
    if options.json is not None:
        options.json.write_text(table.to_json() + "\n", encoding="utf-8")
    return FAILED_EXIT if table.failed else 0


def _called(name: str) -> dict[str, Any]:
    """Call module:function and return its result as the arguments of `mmqk.monitors.preflight`, by name."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UserError(f"{name} is not module:function: give both, as in train:checked for checked() in train.py")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UserError(f"there is no module {module}: give a module that Python can import from here") from error
    if not callable(function):
        raise UserError(f"{module} has no function {attribute}: give the name of a function without arguments")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise UserError(f"{name} takes arguments: give a function without arguments") from error
    result = function()
    if isinstance(result, tuple):
        result = dict(zip(NAMES, result, strict=False))
    if not isinstance(result, Mapping) or not {"model", "batch"} <= set(result) <= set(NAMES):
        keys = ", ".join(map(str, result)) if isinstance(result, Mapping) else type(result).__name__
        raise UserError(f"{name} returns {keys}: return a dictionary with model and batch, and optionally {NAMES[2:]}")
    return dict(result)
