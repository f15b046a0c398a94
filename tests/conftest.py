"""Fixtures of all tests: a tiny data set and the command line of a tiny run, made once a session."""

from __future__ import annotations

import functools
import os
from pathlib import Path

if (
    "PYTEST_XDIST_WORKER" in os.environ
):  # one of several that test side by side: a thread each, children included
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests import tiny


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    """The folder of `tests.tiny`, made once a session."""
    root = tmp_path_factory.mktemp("tiny")
    tiny.write_tiny_data(root)
    return root


@pytest.fixture(scope="session")
def tiny_args(tiny_data: Path) -> list[str]:
    """Command line of a run that trains in a second."""
    return tiny.tiny_args(tiny_data)


def leave_figures_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("mmqk.report.page.figure_files", lambda brush, figure: {})
    patch.setattr("mmqk.report.page.svg_panels", lambda brush, figure: [[""] * len(row) for row in figure.rows])


@pytest.fixture
def without_figures(monkeypatch):
    """Leave the drawings out of reports, because they take most of the time; for tests of words and tables."""
    leave_figures_out(monkeypatch)


@pytest.fixture(scope="session", autouse=True)
def one_parser():
    """`resolve` builds its parser once per session for each program name, which takes half of its time."""
    from mmqk.config import parse
    from mmqk.store import OneSentenceParser

    build = parse.build_parser
    kept = functools.cache(lambda program, help_all: build(help_all))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            parse, "build_parser", lambda help_all=False: kept(OneSentenceParser.program, help_all)
        )
        yield


def leave_figure_files_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("mmqk.report.page.figure_files", lambda brush, figure: {})


@pytest.fixture
def without_figure_files(monkeypatch):
    """Draw the figures of reports on the page only; for tests of the page."""
    leave_figure_files_out(monkeypatch)


@pytest.fixture(scope="module")
def module_without_figure_files():
    """The same for all reports of a module, including those of its fixtures."""
    with pytest.MonkeyPatch.context() as patch:
        leave_figure_files_out(patch)
        yield


@pytest.fixture(scope="module")
def module_without_figures():
    """The same for all reports of a module, including those of its fixtures."""
    with pytest.MonkeyPatch.context() as patch:
        leave_figures_out(patch)
        yield
