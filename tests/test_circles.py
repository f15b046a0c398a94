"""There is no import cycle between files or folders of mmqk; imports inside functions count too."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mmqk"


def imports_of(package: Path) -> dict[str, set[str]]:
    """Return, for each file (such as `model/norms.py`), the files that it imports, except under TYPE_CHECKING."""
    names = {}
    for path in package.rglob("*.py"):
        file = path.relative_to(package).as_posix()
        names[".".join(["mmqk", *Path(file).with_suffix("").parts]).removesuffix(".__init__")] = file
    return {file: set(_imported(package / file, name, names)) - {file} for name, file in names.items()}


def _imported(path: Path, name: str, names: Mapping[str, str]) -> Iterable[str]:
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.dump(branch.test)
        for statement in branch.body
        for node in ast.walk(statement)
    }
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (names[alias.name] for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                found = names.get(f"{module}.{alias.name}", names.get(module))
                if found is not None:
                    yield found


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return one cycle of the graph, or an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def folders(graph: Mapping[str, set[str]], depth: int) -> dict[str, set[str]]:
    """Return the graph of imports between folders. A file at the top of mmqk counts as a folder."""

    def folder(file: str) -> str:
        parts = Path(file).parts
        return "/".join(parts[:1] if len(parts) == 1 else parts[:-1][:depth])

    result: dict[str, set[str]] = {}
    for file, imported in graph.items():
        a = f"{folder(file)}/"
        # Imports between a folder and its own subfolders are left out.
        others = (f"{b}/" for b in map(folder, imported))
        result.setdefault(a, set()).update(b for b in others if not a.startswith(b) and not b.startswith(a))
    return result


def test_no_circle_between_files():
    graph = imports_of(PACKAGE)
    assert {"model/norms.py", "store/metrics.py"} <= graph.keys() and "model/norms.py" in graph["model/attention.py"]
    assert circle(graph) == []


@pytest.mark.parametrize("depth", [1, 2])
def test_no_circle_between_folders(depth):
    assert circle(folders(imports_of(PACKAGE), depth)) == []


@pytest.mark.parametrize(
    ("planted", "between_files", "between_folders"),
    [
        ({"store/metrics.py": "store.formatting", "store/formatting.py": "store.metrics"}, True, False),
        ({"store/metrics.py": "model.norms", "model/norms.py": "store.errors"}, False, True),
        ({"store/metrics.py": "store.formatting"}, False, False),
    ],
)
def test_a_planted_circle_is_seen(tmp_path, planted, between_files, between_folders):
    for file in ("store/metrics.py", "store/formatting.py", "store/errors.py", "model/norms.py"):
        late = f"def late():\n    import mmqk.{planted[file]}\n" if file in planted else ""
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(late)
    graph = imports_of(tmp_path)
    assert bool(circle(graph)) == between_files
    assert bool(circle(folders(graph, 1))) == between_folders
