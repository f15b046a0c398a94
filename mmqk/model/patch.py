"""Functions that a configuration names as ``module:function``, such as a remedy or a fault that is not in mmqk.

`model.patch` names a function that gets a model after it is built and changes it in place; `data.patch` names one
that gets the rows of an optimizer step. The source file of the module is part of the run's identity.

A function runs only if this process got its name from a command line or a configuration (`allow_patch`). The name in
a checkpoint is not enough: nothing that mmqk loads is executed.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_allowed: set[str] = set()


def allow_patch(name: str) -> str:
    """Let ``module:function`` run in this process. Return the SHA-256 of its source file, without importing it.

    Raises:
        ValueError: the name has another form, or there is no such module or function.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"{name} is not module:function: give both, as in remedies:cap for cap() in remedies.py")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # a package above the module
        spec = None
    if spec is None or spec.origin is None:
        raise ValueError(f"there is no module {module}: give a module that Python can import from here")
    source = Path(spec.origin).read_bytes()
    if not re.search(rf"^def {re.escape(function)}\b", source.decode(), re.MULTILINE):
        raise ValueError(f"{module} has no function {function}: give the name of a function of {spec.origin}")
    _allowed.add(name)
    return hashlib.sha256(source).hexdigest()


def check_allowed(name: str) -> None:
    """Raise ValueError if this process may not run ``module:function``; an empty name is allowed."""
    if name and name not in _allowed:
        raise ValueError(f"{name} is code that a file names, and mmqk does not run it unasked")


def named_function(name: str) -> Callable[..., Any]:
    """Import and return ``module:function``; ValueError as in `check_allowed`."""
    check_allowed(name)
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found
