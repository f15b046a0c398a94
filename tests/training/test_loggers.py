"""The values of the TensorBoard files are those of metrics.jsonl, and a resume writes none twice."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mmqk.store import read_metrics
from mmqk.training.loggers import StoryLogger, over_layers


def accumulated(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    found.Reload()
    return found


def test_values_are_those_of_metrics_jsonl(whole):
    found = accumulated(whole)
    lines = {line["step"]: line for line in read_metrics(whole / "metrics.jsonl")}
    assert len(found.Scalars("loss/image")) == 12
    for event in found.Scalars("loss/image"):
        assert event.value == pytest.approx(lines[event.step]["loss/image"], rel=1e-6)
    steps = [event.step for event in found.Scalars("attn_logit_absmax/text-image/max")]
    assert steps == [0, 4, 8, 12]
    for event in found.Scalars("attn_logit_absmax/text-image/max"):
        layers = [lines[event.step][f"attn_logit_absmax/text-image/layer{i:02d}"] for i in range(2)]
        assert event.value == pytest.approx(max(layers), rel=1e-6) != pytest.approx(min(layers), rel=1e-6)


@pytest.mark.parametrize("resumed_at, first_step, twice", [(4, 1, []), (None, 5, []), (8, 1, [5, 6, 7, 8])])
def test_a_resume_writes_a_step_once(resumed_at, first_step, twice, tmp_path):
    """If ``resumed_at`` is None, no value of the earlier process remains. The control is a wrong step, 8: TensorBoard
    then shows steps 5 to 8 twice, because both processes wrote them."""
    for first, last, at in ((1, 8, None), (5, 12, resumed_at)):
        logger = StoryLogger(tmp_path, ("text", "image", "sound"), resumed_at=at)
        for step in range(first, last + 1):
            logger.log_metrics({"loss": 1.0, "loss/text": 2.0, **({"loss/image": 3.0} if step < 8 else {})}, step)
        logger.finalize("success")
        for path in tmp_path.rglob("events.out.tfevents.1[1-9]*"):  # the name has the start time in seconds
            path.rename(path.with_name("events.out.tfevents.1000000000" if first == 1 else "events.out.tfevents.2"))
    for tag, end in (("loss", 12), ("loss/text", 12), ("loss/image", 7)):
        steps = [event.step for event in accumulated(tmp_path).Scalars(tag)]
        assert sorted(steps) == sorted([*range(first_step, end + 1), *(s for s in twice if s <= end)])
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def test_reduction_over_layers():
    values = {f"q_norm/text/layer{i:02d}": float(v) for i, v in enumerate((3, 1, 8))} | {"loss": 2.0}
    assert over_layers(values) == {"q_norm/text/max": 8.0, "q_norm/text/median": 3.0, "loss": 2.0}
    assert over_layers({"q_norm/text/layer00/head01": 1.0, "val_log_z/text": 1.0, "odd/a/b/c": 1.0}) == {}
    for place in range(3):  # a NaN in any layer gives NaN
        bad = {name: math.nan if i == place else v for i, (name, v) in enumerate(values.items())}
        shown = over_layers(bad)
        assert math.isnan(shown["q_norm/text/max"]) and math.isnan(shown["q_norm/text/median"])
    clip = {f"qk_clip_gamma/layer{i:02d}": v for i, v in enumerate((0.9, 0.4, 1.0))} | {"other/layer00": 1.0}
    assert over_layers(clip) == {"qk_clip_gamma/min": 0.4}
