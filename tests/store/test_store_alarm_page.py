"""docs/alarms.md agrees with the code: every alarm, the numbers of its rule, the options, and the example line."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mmqk.config import AlarmConfig, resolve
from mmqk.store import AlarmRules, divergence, rules
from mmqk.store.alarms import NAMES

PAGE = Path(__file__).parents[2] / "docs/alarms.md"
TEXT = PAGE.read_text(encoding="utf-8")
def rows(text: str) -> dict[str, list[str]]:
    """Return the cells of the first table, by the name of the alarm."""
    table = text.partition("| alarm |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {first.strip("`"): rest for first, *rest in cells}


def test_every_alarm_has_a_row():
    assert tuple(rows(TEXT)) == NAMES
    assert tuple(rows(re.sub(r"\| `stall`.*\n", "", TEXT))) != NAMES  # the control


def test_the_words_of_a_rule_have_its_numbers():
    said = {alarm: cells[1] for alarm, cells in rows(TEXT).items()}
    for alarm, numbers in {
        "spike": (rules.SPIKE_STDS, rules.SPIKE_FEWEST),
        "spike_median": (rules.MEDIAN_WINDOW, rules.ABOVE_MEDIAN_NATS, rules.ABOVE_MEDIAN_STDS),
        "stall": (rules.STALL_MEDIAN, rules.STALL_FEWEST_STEPS, rules.STALL_NATS, rules.STALL_ABOVE_NATS),
        "growth": (rules.GROWTH_PROBES, rules.GROWTH_ERRORS, rules.GROWTH_FACTOR, rules.GROWTH_LOGIT),
        "divergence": (divergence.ABOVE_INITIAL_NATS, divergence.DIVERGENCE_WINDOW, divergence.ABOVE_BEST_NATS),
    }.items():
        assert all(re.search(rf"(?<![\d.]){n:g}(?![\d.])", said[alarm]) for n in numbers), alarm


def series_of(cell: str) -> set[str]:
    """Return an example tag for each series that a cell names, with a modality and a layer if the series has them."""
    kinds = {"attn_logit_absmax": "text-text/layer00", "final_norm": "text", "attn_entropy": "text/layer00"}
    kinds |= dict.fromkeys(("q_norm", "k_norm", "resid_norm"), "text/layer00")
    names = [name.replace("TARGET", "text") for name in re.findall(r"`([^`]+)`", cell)]
    return {f"{name}/{kinds[name]}" if name in kinds else name for name in names}


@pytest.mark.parametrize("alarm", ["spike", "spike_median", "growth", "collapse", "divergence"])
def test_the_series_of_a_rule_are_those_that_ring_it(alarm):
    """Every series here has every kind of event. The rule must give an alarm for the series that its row names, and
    for no other series."""
    named = series_of(rows(TEXT)[alarm][0])
    others = {
        "lr",
        "v_norm/text/layer00",
        "grad_norm/embed.weight",
        "q_norm_max/text/layer00",
        "val_loss/text",
    }
    others |= {"loss", "grad_norm", "attn_entropy/text/layer00", "final_norm/text"} - named
    for name in named | others:
        rules, found = AlarmRules(10, 2000), set()
        for step in range(1, 1500):
            value = 60.0 + 0.001 * (step % 7)
            value *= (
                2.0 ** max(0, (step - 500) / 100) if 500 < step < 1000 else (0.01 if step > 1000 else 1.0)
            )
            found |= {a.name for a in rules.update(step, {name: value + 50.0 * (step == 450)})}
        assert (alarm in found) is (name in named), name


def test_the_example_is_a_command_and_a_line_of_it(monkeypatch):
    monkeypatch.chdir(PAGE.parents[1])
    command = re.search(r"```\n(mmqk train .*?)```", TEXT, re.DOTALL)
    assert command is not None
    run = resolve(["--config=configs/cpu.yaml", *shlex.split(command[1])[3:]])
    assert run.alarm.acts and run.alarm.probe_steps == 50 and run.alarm.stop == ["collapse"]
    options = re.findall(r"^\| `--alarm\.(\w+)(?:=false)?` \|", TEXT, re.MULTILINE)
    assert sorted([*options, "probe_steps"]) == sorted(vars(AlarmConfig()))
    assert f"`--alarm.probe_steps` steps ({AlarmConfig().probe_steps})" in TEXT
    rules, name = AlarmRules(100, 1000), "attn_logit_absmax/image-image/layer01"
    lines = [
        alarm.line()
        for step in range(0, 1000, 20)
        for alarm in rules.update(step, {name: 40 * 2 ** (step / 210)})
    ]
    assert [f"    alarm at {line}" for line in lines] == [TEXT.splitlines()[-1]]
