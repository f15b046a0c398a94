"""Functions that a configuration names as ``module:function``, such as a remedy or a fault that is not in mmqk.

`model.patch` names a function that gets a model after it is built and changes it in place; `data.patch` names one
that gets the rows of an optimizer step. The source file of the module is part of the run's identity.

A function runs only if the user of this process named it, on the command line or in a configuration
(`allow_patch`). A name in a checkpoint is not enough, because nothing that mmqk loads is executed.
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


def is_allowed(name: str) -> bool:
    """Return whether this process may run ``module:function``; an empty name runs nothing."""
    return not name or name in _allowed


def named_function(name: str) -> Callable[..., Any]:
    """Import and return ``module:function``.

    Raises:
        ValueError: `allow_patch` was not called with this name.
    """
    if not is_allowed(name):
        raise ValueError(f"{name} is code that only a file names: call allow_patch first")
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found
