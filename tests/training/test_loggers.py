"""TensorBoard: few tags, every chart has lines, every value is the run's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mmqk.store import read_metrics
from mmqk.train import main
from mmqk.training.loggers import custom_scalars, over_layers


@pytest.fixture(scope="module")
def run(tiny_args, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("tb") / "run"
    assert main([*tiny_args, f"--out={out}"]) == 0
    return out


@pytest.fixture(scope="module")
def events(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run), size_guidance={"scalars": 0})
    found.Reload()
    return found


def test_at_most_sixty_tags_and_text_beside_image(events):
    tags = events.Tags()["scalars"]
    assert len(tags) <= 60
    for name in ("loss", "val_loss", "log_z", "final_norm", "q_norm/{}/max", "k_norm/{}/median"):
        for modality in ("text", "image"):
            tag = name.format(modality) if "{}" in name else f"{name}/{modality}"
            assert tag in tags
    assert not any("layer" in tag for tag in tags)


def test_every_chart_of_the_layout_matches_a_tag_of_each_modality(events):
    tags = events.Tags()["scalars"]
    charts = [chart for category in custom_scalars(("text", "image")).values() for chart in category.items()]
    assert len(charts) >= 10
    for title, (kind, patterns) in charts:
        matched = [tag for tag in tags if any(re.match(pattern, tag) for pattern in patterns)]
        assert kind == "Multiline" and len(matched) >= 2, title
        assert any("text" in tag for tag in matched) and any("image" in tag for tag in matched), title
    assert "custom_scalars__config__" in events.Tags()["tensors"]


def test_values_are_those_of_metrics_jsonl(run, events):
    lines = {line["step"]: line for line in read_metrics(run / "metrics.jsonl")}
    for event in events.Scalars("loss/image"):
        assert event.value == pytest.approx(lines[event.step]["loss/image"], rel=1e-6)
    steps = [event.step for event in events.Scalars("attn_logit_absmax/text-image/max")]
    assert steps == [0, 4, 8, 12]
    for event in events.Scalars("attn_logit_absmax/text-image/max"):
        layers = [lines[event.step][f"attn_logit_absmax/text-image/layer{i:02d}"] for i in range(2)]
        assert event.value == pytest.approx(max(layers), rel=1e-6) != pytest.approx(min(layers), rel=1e-6)


def test_layers_are_written_on_request(tiny_args, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert main([*tiny_args, "--monitor.tensorboard_layers=true", f"--out={tmp_path / 'all'}"]) == 0
    found = EventAccumulator(str(tmp_path / "all"))
    found.Reload()
    assert "q_norm/text/layer01" in found.Tags()["scalars"]


def test_reduction_over_layers():
    values = {f"q_norm/text/layer{i:02d}": float(v) for i, v in enumerate((3, 1, 8))} | {"loss": 2.0}
    assert over_layers(values) == {"q_norm/text/max": 8.0, "q_norm/text/median": 3.0, "loss": 2.0}
    clip = {f"qk_clip_gamma/layer{i:02d}": v for i, v in enumerate((0.9, 0.4, 1.0))} | {"other/layer00": 1.0}
    assert over_layers(clip) == {"qk_clip_gamma/min": 0.4}
