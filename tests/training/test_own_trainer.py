"""Run the unchanged example code of the docs, which uses parts of mmqk in a user's own lightning.Trainer."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mmqk.data.loader import PositionedLoader
from mmqk.store import UserError

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore")


def block(page: str, section: str) -> str:
    """Return the first Python block of a section."""
    text = (ROOT / page).read_text().partition(f"## {section}\n")[2]
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def run(tmp_path: Path, monkeypatch) -> Callable[[str], dict[str, Any]]:
    """Return a function that runs code in a folder with mmqk's data and returns the variables of the code."""
    for name in ("data", ".cache"):
        (ROOT / name).mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def run(code: str) -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": "mine"}
        torch.manual_seed(0)
        exec(code, names)
        return names

    return run


def logged(trainer: L.Trainer) -> dict[str, list[int]]:
    """Return the steps of each tag in the logger that Lightning created."""
    events = EventAccumulator(trainer.logger.log_dir, size_guidance={"scalars": 0}).Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_the_docs_train_mmqks_model_and_the_monitor_changes_no_weight(run):
    code = block("docs/train.md", "In your own Trainer")
    names = run(code)
    tags = logged(names["trainer"])
    assert names["trainer"].global_step == 20
    assert all(tags[tag] == list(range(1, 21)) for tag in ("loss/text", "loss/image", "grad_norm", "lr"))
    assert tags["attn_logit_absmax/text-image/layer01"] == tags["q_norm/image/layer00"] == [10, 20]
    # The control: without the callbacks the weights are equal, and the statistics are missing.
    without = run(code.replace("callbacks=[StepLog(), monitor]", "callbacks=[]"))
    assert not any(tag.startswith(("loss", "attn", "q_norm")) for tag in logged(without["trainer"]))
    before, after = (n["module"].model.state_dict() for n in (without, names))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_the_docs_measure_somebodys_own_module(run):
    code = block("docs/monitors.md", "In Lightning")
    names = run(code)
    tags = logged(names["trainer"])
    assert tags["attn_logit_absmax/text-image/layer01"] == tags["q_norm/text/layer01"] == [10, 20]
    # The control: a module name that does not exist is refused in one sentence.
    with pytest.raises(UserError, match=r"NormMonitor\(model='nett'\): Mine has no such module"):
        run(code.replace('"net"', '"nett"'))


def test_a_position_in_the_data_is_that_of_its_batch_size():
    def loader(batch_size, accumulate):
        dataset = SimpleNamespace(batch_size=batch_size, accumulate=accumulate, ahead=0, skip=[])
        return PositionedLoader(dataset, 0, torch.device("cpu"))

    saved = loader(8, 2).state_dict() | {"position": 6}
    for name, other in (("batch_size", loader(4, 2)), ("accumulate", loader(8, 4))):
        with pytest.raises(UserError, match=f"The checkpoint was written with {name} "):
            other.load_state_dict(saved)
    same = loader(8, 2)
    for state in (saved, {"position": 6, "ahead": 0}):  # a fork writes its position itself
        same.load_state_dict(state)
        assert same.position == 6
