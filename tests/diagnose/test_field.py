"""The logs of other people's runs in tests/diagnose/logs: what their authors reported is what is read.

The steps and values below were taken from the reports by hand.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mmqk.diagnose.findings import diagnose
from mmqk.diagnose.logs import read_log

LOGS = Path(__file__).parent / "logs"
# file: format, number of losses, the first bad step, its series and the value there (inf: NaN), the value before it
FACTS = {
    "01_nanogpt_fp16.txt": ("nanoGPT output", 15, 3010, "loss", np.inf, 4.2490),
    "02_torchtitan_fp8.txt": ("torchtitan output", 4, 2, "grad_norm", 572.0, 105.0),
    "03_megatron_no_loss.txt": ("Megatron output", 3, 3385, "loss", np.inf, 0.7072597),
    "04_neox_bf16.txt": ("GPT-NeoX output", 2, 2, "loss", 11.05449, 2.275809),
    "05_lora_rise.txt": ("transformers output", 10, 4, "grad_norm", 17.22315788269043, 1.2771899700164795),
    "06_video_loss_zero.txt": ("transformers output", 7, 2, "loss", 0.0, 1.8055),
    "07_caption_reward_zero.txt": ("fairseq output", 4, 10, "grad_norm", 0.0, None),
    "08_vlm_loss_low.json": ("trainer_state.json", 90, 40, "loss", 0.40562, 5.4631),
    "09_dpo_saturates.txt": ("transformers output", 9, 5, "loss", 0.0076, 2.1113),
    "10_detector_warmup.txt": ("output", 5, 750, "loss", np.inf, 9.07),
    "11_lightning_stalled.csv": ("CSV", 220, 49, "loss", 7.6820597648620605, None),
    "12_mmengine_grad_nan.txt": ("OpenMMLab output", 6, 240, "grad_norm", np.inf, 2.5099),
}


@pytest.mark.parametrize("name", FACTS)
def test_the_first_bad_step_is_read_as_it_was_published(name):
    kind, losses, step, tag, value, before = FACTS[name]
    log = read_log(LOGS / name)
    series = log.metrics[tag].dropna()
    assert (log.format, log.metrics["loss"].count()) == (kind, losses)
    assert series.loc[step] == value
    assert before is None if series.index[0] == step else series.loc[:step].iloc[-2] == before


def test_a_line_without_a_loss_is_not_a_nan_if_the_iteration_was_skipped(tmp_path):
    text = (LOGS / "03_megatron_no_loss.txt").read_text()
    skipped = tmp_path / "skipped.txt"
    skipped.write_text(text.rstrip() + " number of skipped iterations:   1 |\n")
    assert np.isfinite(read_log(skipped).metrics["loss"].dropna()).all()


@pytest.mark.parametrize(
    ("name", "fired"),
    [("01_nanogpt_fp16.txt", 3010), ("03_megatron_no_loss.txt", 3385), ("12_mmengine_grad_nan.txt", 240),
     ("00_control_falls.csv", None), ("04_neox_fp16.txt", None)],
)  # fmt: skip
def test_the_first_alarm_is_at_the_first_nan_and_healthy_logs_have_none(name, fired):
    found = diagnose(read_log(LOGS / name))
    assert found["found"] == (fired is not None)
    assert [alarm["step"] for alarm in found["alarms"][:1]] == ([] if fired is None else [fired])


def test_the_kept_answers_are_those_of_every_log():
    kept = json.loads((Path(__file__).parents[2] / "reports/diagnose/field.json").read_text(encoding="utf-8"))
    assert sorted(kept) == sorted(path.name for path in LOGS.iterdir() if path.suffix != ".md")
    for name in ("02_torchtitan_fp8.txt", "11_lightning_stalled.csv"):
        assert [line for line in kept[name]["mmqk"] if line.startswith("alarm")] == [
            f"alarm {a['name']}: {a['series']} at step {a['step']}" for a in diagnose(read_log(LOGS / name))["alarms"]
        ]
