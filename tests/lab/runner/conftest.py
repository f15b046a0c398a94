"""A replacement for training, so that tests of `mmqk.ablate` do not train a model."""

import os
import sys
from pathlib import Path

import pytest

import mmqk
import mmqk.config.parse  # before `fake_train` replaces mmqk.config
from mmqk import ablate
from mmqk.store import cli_main

GRID = """
name: toy
base: base.yaml
seeds: [0, 1]
quick: [good]
arms:
  good: {set: {act: finish}}
  wild: {seeds: [0], set: {act: diverge}}
"""


@pytest.fixture(scope="module")
def fake():
    """Make `fake_train` importable in this process and in the processes that it starts."""
    here = Path(__file__).parent
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(here))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(here.parents[2])]))
        yield


@pytest.fixture
def world(fake, tmp_path, monkeypatch):
    """Return ``run(*arguments, grid=...)``, which calls `mmqk.ablate` in a folder with a base configuration and these
    grids."""
    import fake_train

    monkeypatch.setitem(sys.modules, "mmqk.config", fake_train)
    monkeypatch.setattr(mmqk, "config", fake_train, raising=False)
    monkeypatch.setattr(ablate, "TRAIN", "fake_train:main")
    monkeypatch.setattr(ablate, "PRELOAD", ("fake_train",))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(ablate, "gpus", lambda: ())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text("{}")

    def run(*argv, grid=None, **more):
        for name, text in {"toy": grid, **more}.items():
            if text is not None:
                (tmp_path / f"{name}.yaml").write_text(text)
        configs = ["--config", "toy.yaml"] + [part for name in more for part in ("--config", f"{name}.yaml")]
        return cli_main(ablate.main)([*configs, *argv])

    return run


@pytest.fixture
def toy(world):
    """Return `world` with `GRID` as its grid, unless another one is given."""
    return lambda *argv, grid=GRID: world(*argv, grid=grid)
