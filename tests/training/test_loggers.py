"""The TensorBoard files have few tags, no chart is empty, and the values are those of metrics.jsonl."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from mmqk.store import Alarm, read_metrics
from mmqk.train import main
from mmqk.training.loggers import RunLogger
from mmqk.training.tensorboard import StoryLogger, custom_scalars, over_layers


@pytest.fixture(scope="module")
def events(whole):
    return accumulated(whole)


def accumulated(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    found.Reload()
    return found


@pytest.fixture(scope="module")
def scalars(events) -> set[str]:
    return set(events.Tags()["scalars"])


def charts(modalities=("text", "image")) -> dict[str, list]:
    return {title: chart for page in custom_scalars(modalities).values() for title, chart in page.items()}


def test_at_most_sixty_tags_of_both_modalities(scalars):
    assert len(scalars) <= 60
    for name in ("loss/{}", "val_loss/{}", "log_z/{}", "final_norm/{}", "q_norm/{}/max", "k_norm/{}/median"):
        assert {name.format("text"), name.format("image")} <= scalars
    assert {f"attn_logit_absmax/image-{key}/max" for key in ("text", "image")} <= scalars
    assert {"loss", "lr", "grad_norm", "alarms"} <= scalars
    assert not any("layer" in tag for tag in scalars)


def test_a_run_is_one_event_run(whole):
    """Each folder with events is one; TensorBoard's page selects no run if there are more than 40."""
    assert [path.parent for path in whole.rglob("events.out.*")] == [whole]


def test_every_chart_of_the_layout_matches_a_tag_of_each_modality(events, scalars):
    assert len(charts()) >= 20
    for title, (kind, patterns) in charts().items():
        matched = {tag for tag in scalars if any(re.match(p, tag) for p in patterns)}
        assert kind == "Multiline" and matched, title
        if title not in custom_scalars(())["Run"]:
            queries = {tag.split("/")[1].split("-")[0] for tag in matched if "/" in tag}
            assert queries == {"text", "image"}, title
    assert "custom_scalars__config__" in events.Tags()["tensors"]


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


@pytest.mark.parametrize("layers", [True, False])
def test_layers_are_written_on_request(tmp_path, layers):
    logger = StoryLogger(tmp_path, ("text", "image"), layers=layers)
    logger.log_metrics({"q_norm/text/layer01": 1.0, "loss": 2.0}, 1)
    logger.finalize("success")
    found = set(accumulated(tmp_path).Tags()["scalars"])
    assert ("q_norm/text/layer01" in found) is layers and ("q_norm/text/max" in found) is not layers


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


def test_alarms_join_the_line_that_is_collected_or_have_their_own_and_are_counted(tmp_path):
    logger = RunLogger(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        logger.log_metrics({"loss": float(step)}, step)
    alarms = [
        Alarm(name, step, "loss", 1.0, 1.0, "said") for name, step in (("spike", 2), ("stall", 3), ("stall", 3))
    ]
    logger.log_alarms(alarms)
    text = (tmp_path / "metrics.jsonl").read_text().splitlines()  # on disk before the logger is closed
    assert [json.loads(line) for line in text[2:]] == [
        {"step": 3, "loss": 3.0, "alarm/stall": 2.0},
        {"step": 2, "alarm/spike": 1.0},
    ]
    logger.log_metrics({"val_loss/text": 5.0}, 3)
    logger.log_alarms(alarms[2:])  # another alarm of step 3
    logger.finalize("success")
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 2.0, "alarm/spike": 1.0},
        {"step": 3, "loss": 3.0, "val_loss/text": 5.0, "alarm/stall": 3.0},
    ]


# The outcome ------------------------------------------------------------------------------------------------


def rows(folder: Path) -> tuple[dict, list[str], str]:
    """Return (hyperparameters, tags of the metrics, status) of a run's row in HParams; all are empty if it has
    no row."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import api_pb2, metadata

    events = EventAccumulator(str(folder))
    events.Reload()
    content = events.summary_metadata

    def data(tag, parse):
        return parse(content[tag].plugin_data.content) if tag in content else None

    start = data(metadata.SESSION_START_INFO_TAG, metadata.parse_session_start_info_plugin_data)
    end = data(metadata.SESSION_END_INFO_TAG, metadata.parse_session_end_info_plugin_data)
    experiment = data(metadata.EXPERIMENT_TAG, metadata.parse_experiment_plugin_data)
    if start is None:
        return {}, [], ""
    row = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
    assert {info.name for info in experiment.hparam_infos} == row.keys()
    metrics = [info.name.tag for info in experiment.metric_infos]
    return row, metrics, api_pb2.Status.Name(end.status)


def test_hparams_have_the_settings_and_the_outcome(whole, scalars):
    row, metrics, status = rows(whole)
    assert status == "STATUS_SUCCESS" and row["as ended"] == "completed" and row["at step"] == 12
    assert row["arm"] == whole.name
    assert row["optim.lr"] == 0.01 and row["model.qk_norm.kind"] == "none" and row["seed"] == 0
    assert {"loss/text", "val_loss/image", "attn_logit_absmax/text-text/max", "alarms"} <= set(metrics)
    assert set(metrics) <= scalars


def test_an_interrupted_run_has_no_row_until_it_ends(tiny_args, tmp_path):
    out = tmp_path / "run"
    args = [*tiny_args, f"--out={out}", "--alarm.stop=[collapse]"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmqk.store.rules.COLLAPSE_SHARE", 1e9)
        assert main(args) == 130  # at the first step after a probe
    assert rows(out) == ({}, [], "")
    assert main(args) == 0
    assert rows(out)[0]["as ended"] == "completed"
