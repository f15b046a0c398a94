"""The files that ship with mmqk: configs/, data/ and reports/bench/.

In a checkout they are beside the package. In an installed package they are in ``mmqk/shipped``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from mmqk.store.errors import UserError

PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = PACKAGE / "shipped" if (PACKAGE / "shipped").is_dir() else PACKAGE.parent
FOLDERS = ("configs", "data", "reports")

# Folders in which the name of a config or a grid is looked up.
CONFIGS = ("configs",)
GRIDS = ("configs/ablations", "configs/claims", "configs/failures")
LARGEST_GRID = 2**20  # bytes in which the key of a grid is looked up


def find_file(path: str | Path) -> Path:
    """Return the path of a file in the working directory or, if it is not there, among the shipped files. If the file
    is in neither place, return ``path`` unchanged."""
    path = Path(path)
    shipped = SHIPPED / path
    here = path.is_absolute() or path.exists() or path.parts[:1] == () or path.parts[0] not in FOLDERS
    return path if here or not shipped.exists() else shipped


def named_config(name: str, folders: Sequence[str] = CONFIGS) -> Path | None:
    """Return the file that a name (``demo``, ``recipes/olmo2``) or a path (``configs/demo.yaml``) stands for; None if
    there is none."""
    named = (SHIPPED / folder / f"{name}.yaml" for folder in folders)
    return next((path for path in (find_file(name), *named) if path.is_file()), None)


def _config(value: str, folders: Sequence[str]) -> str:
    """Return the value of ``--config`` with a shipped name replaced by the path of its file. JSON is not changed."""
    if value.lstrip().startswith("{"):
        return value
    file = named_config(value, folders)
    grid = (file or named_config(value, GRIDS)) if folders == CONFIGS else None
    if grid is not None and _is_grid(grid):
        raise UserError(
            f"{value} is a grid of runs, not the configuration of one run: train it with mmqk ablate {value}"
        )
    if file is not None:
        return str(file)
    if Path(value).suffix or Path(value).exists():
        return value  # the code that reads the file raises the error
    near = _nearest(value, folders)
    raise UserError(
        f"{value} is neither a file nor the name of a shipped {'grid' if folders == GRIDS else 'configuration'}: "
        + (f"did you mean {near}?" if near else f"give a path, or one of {', '.join(shipped_names(folders))}")
    )


def _is_grid(file: Path) -> bool:
    """Return whether a YAML file has the key ``arms`` of a grid; False if it cannot be read."""
    try:
        with open(file, "rb") as content:
            return re.search(rb"^arms\s*:", content.read(LARGEST_GRID), re.MULTILINE) is not None
    except OSError:
        return False  # the code that reads the file raises the error


def _nearest(name: str, folders: Sequence[str]) -> str | None:
    """Return the shipped name most similar to this one, with or without its folder; None if no name is similar."""
    known = {short: full for full in shipped_names(folders) for short in (Path(full).name, full)}
    near = difflib.get_close_matches(name, known, n=1)
    return known[near[0]] if near else None


def shipped_names(folders: Sequence[str]) -> list[str]:
    """Return the names of the shipped files in these folders and in their subfolders ``recipes``."""
    roots = [SHIPPED / folder for folder in folders]
    files = [(root, path) for root in roots for path in (*root.glob("*.yaml"), *root.glob("recipes/*.yaml"))]
    return sorted(path.relative_to(root).with_suffix("").as_posix() for root, path in files)


def with_configs(argv: Sequence[str], folders: Sequence[str] = CONFIGS) -> list[str]:
    """Return a command line in which the value of each ``--config`` is a path.

    A first word without leading dashes and without ``=`` is a config too, and so are the words after it that name a
    config.

    ``demo optim.lr=0.01`` becomes ``--config path/to/configs/demo.yaml optim.lr=0.01``.

    Args:
        argv: the command line.
        folders: the shipped folders in which names are looked up.

    Raises:
        UserError: a config is neither a file nor a shipped name, or is a grid although one run is trained.
    """
    words, place = list(argv), 0
    while place < len(words) and _names_config(words[place], folders, first=place == 0):
        words.insert(place, "--config")
        place += 2
    for i, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag == "--config" and equals:
            words[i] = f"--config={_config(value, folders)}"
        elif i and words[i - 1] == "--config" and not word.startswith("-"):
            words[i] = _config(word, folders)
    return words


def _names_config(word: str, folders: Sequence[str], first: bool) -> bool:
    """Return whether a word at the start of a command line is a config. A word after the first is a config only if it
    looks like one."""
    if word.startswith("-") or "=" in word:
        return False
    named = named_config(word, (*folders, *GRIDS)) or _nearest(word, folders)
    return first or named is not None or Path(word).suffix in (".yaml", ".yml")
