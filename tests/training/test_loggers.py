"""The values of the TensorBoard files are those of metrics.jsonl; `test_resume` checks that none is written twice."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mmqk.store import read_metrics
from mmqk.training.loggers import over_layers


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
