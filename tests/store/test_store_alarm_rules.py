"""Check every alarm rule on series with known events, on noise alone, and with a resume in the middle of a run."""

from __future__ import annotations

import errno
import itertools
import json
import math
import random
import statistics
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest

from mmqk.store import Alarm, AlarmRules, alarms_of, append_alarms, read_alarms, truncate_alarms
from mmqk.store.alarms import NAMES, Rise
from mmqk.store.rules import Collapse, Growth, Spike, SpikeOfMedian, Stall


def noise(n, seed=0, mean=3.0, std=0.02):
    rng = random.Random(seed)
    return [rng.gauss(mean, std) for _ in range(n)]


def fed(rule, values, *more, start=1, every=1):
    """Return the alarms of a rule for one value per step, from step `start` on."""
    given = (rule.update(start + every * i, "loss", value, *more) for i, value in enumerate(values))
    return [alarm for alarm in given if alarm is not None]


# Spikes -------------------------------------------------------------------------------------------------------


def planted_spike(n=400, at=300, height=1.0, seed=0):
    values = noise(n, seed)
    values[at] += height
    return values


@pytest.mark.parametrize("rule", [Spike, SpikeOfMedian])
def test_a_planted_spike_is_found_where_it_is_and_once(rule):
    values = planted_spike()
    values[301] = values[300]  # the spike continues for a second step
    found = fed(rule(), values)
    assert [alarm.step for alarm in found] == [301]
    assert found[0].value == values[300] >= found[0].threshold and "loss" in found[0].sentence


def test_the_thresholds_of_the_spike_rules_are_those_of_their_sources():
    calm = [3.0 + 0.02 * (-1) ** i for i in range(300)]
    mean, std = statistics.fmean(calm), statistics.stdev(calm)
    for stds, rings in ((6.99, False), (7.01, True)):
        assert bool(fed(Spike(), [*calm, mean + stds * std])) is rings
    for above, rings in (
        (0.099, False),
        (0.101, True),
    ):  # the quartiles of this window give a threshold of at most 0.015 x 6 = 0.09, so the limit of 0.1 nat decides
        flat = [3.0 + 0.01 * (-1) ** i for i in range(300)]
        median = statistics.median([*flat[-200:], 9.0])
        assert bool(fed(SpikeOfMedian(), [*flat, median + above])) is rings


def test_spikes_need_their_fewest_values_and_a_scale():
    for n, rings in ((99, False), (100, True)):
        assert bool(fed(Spike(), [*noise(n), 9.0])) is rings
    for n, rings in ((199, False), (200, True)):
        assert bool(fed(SpikeOfMedian(), [*noise(n), 9.0])) is rings
    assert not fed(Spike(), [3.0] * 500 + [3.1])
    assert not fed(Spike(), [*noise(300), math.nan, math.inf])


@pytest.mark.parametrize("height", [3.0, 1e9, 1e300])
def test_moments_are_those_of_the_standard_library_and_a_huge_value_is_forgotten(monkeypatch, height):
    monkeypatch.setattr("mmqk.store.rules.SPIKE_WINDOW", 51)
    values, rule = [*noise(500, mean=100.0, std=1.0), *noise(500, seed=1, std=1e-4), 3], Spike()
    values[300] = height
    for i, value in enumerate(values):
        rule.update(i, "loss", value)
        last = values[max(0, i - 50) : i + 1]
        if i and (height < 1e200 or height not in last):  # the standard library needs a second for each such window
            mean, std = rule.moments()
            assert mean == pytest.approx(statistics.fmean(last), rel=1e-12)
            assert std == pytest.approx(statistics.stdev(last), rel=1e-12)


def test_noise_alone_spikes_at_most_once_in_sixteen_thousand_steps():
    for rule, std in ((Spike, 0.02), (SpikeOfMedian, 0.02), (SpikeOfMedian, 0.3)):
        assert sum(len(fed(rule(), noise(4000, seed, std=std))) for seed in range(4)) <= 1


# Rise ---------------------------------------------------------------------------------------------------------


def test_a_rise_above_the_noise_is_found_and_the_threshold_is_that_of_numpy():
    values = noise(400, std=0.2)
    values[300:] = [value + 0.5 for value in values[300:]]
    found = fed(Rise(20), values)
    assert [alarm.name for alarm in found] == ["rise"] and 310 < found[0].step < 350
    seen = np.array(values[20 : found[0].step])  # the losses after the warm-up
    medians = pd.Series(seen).rolling(50).median()
    steps = np.sort(np.diff(seen[-101:]))
    error = (steps[-26] - steps[25]) / 1.349 / math.sqrt(50)
    assert found[0].threshold == pytest.approx(medians.iloc[-200:].min() + 6 * error)
    assert found[0].value == pytest.approx(medians.iloc[-1]) and medians.iloc[-2] <= found[0].threshold


def test_a_falling_loss_one_bad_batch_and_the_warmup_do_not_rise():
    falling = [7.0 - 0.005 * i + e for i, e in enumerate(noise(600, mean=0.0, std=0.2))]
    assert not fed(Rise(20), falling)
    assert not fed(Rise(20), planted_spike(height=9.0))
    assert sum(len(fed(Rise(20), noise(1500, seed))) for seed in range(10)) <= 1
    warming = [3.0 - 0.1 * (i < 20) for i in range(200)]
    assert not fed(Rise(20), warming) and fed(Rise(0), [3.0] * 60 + [3.1] * 60)  # the control


# Stall --------------------------------------------------------------------------------------------------------


def stalls(values, ceiling, warmup=20, max_steps=1500):
    return fed(Stall(warmup, max_steps), values, ceiling)


def test_a_loss_that_rests_above_its_ceiling_stalls_once():
    falling = [7.0 - 0.01 * i for i in range(200)]
    found = stalls(falling + noise(600, mean=5.0), ceiling=4.0)
    assert len(found) == 1 and found[0].name == "stall"
    # The loss stops falling at step 200. Its 50-step median falls by 0.05 nat for the last time about 25 steps later.
    # The alarm comes after 300 more steps without such a fall; 300 is a fifth of the run's 1,500 steps.
    assert found[0].step == pytest.approx(200 + 25 + 300, abs=6)


def test_a_loss_below_its_ceiling_or_improving_or_without_a_ceiling_does_not_stall():
    assert not stalls(noise(1000, mean=5.0), ceiling=5.2)
    assert not stalls(noise(1000, mean=5.0), ceiling=None)
    assert not stalls([9.0 - 0.0003 * i for i in range(5000)], ceiling=4.0)
    assert not stalls(noise(310, mean=5.0), ceiling=4.0)  # too short for a stall
    assert stalls(noise(400, mean=5.0), ceiling=4.0)


# Growth -------------------------------------------------------------------------------------------------------


def growing(rate, start=60.0, probes=50, std=0.02, seed=0):
    """Return one value per probe; the values double every 1 / rate probes."""
    return [start * 2 ** (rate * i) * math.exp(e) for i, e in enumerate(noise(probes, seed, 0.0, std))]


def grows(values, fewest=0.0, max_steps=1000, warmup=100):
    return fed(Growth(warmup, max_steps, fewest), values, start=0, every=20)


def test_growth_is_found_when_it_has_doubled_since_a_fifth_of_the_run():
    found = grows(growing(0.1))  # doubles every 200 steps, so at step 400 it has doubled since step 200
    assert len(found) == 1 and found[0].step == pytest.approx(400, abs=20) and found[0].name == "growth"
    assert "doubles every" in found[0].sentence and found[0].value >= found[0].threshold


def test_slow_early_small_and_past_growth_are_not_alarms():
    assert not grows(growing(0.018))  # doubles every 1,100 steps, which is longer than the run
    early = growing(0.6, probes=11)
    assert not grows(early + [early[-1]] * 40)  # growth that ends before a fifth of the run
    small = growing(0.1, start=4.0, probes=40)
    assert not grows(small, fewest=100.0) and grows(small, fewest=20.0)
    late = [60.0] * 40 + growing(0.3, probes=11)  # has doubled, but the run ends before it would double again
    assert all(alarm.step < 1000 - 60 for alarm in grows(late))
    assert not grows([-v for v in growing(0.1)])


def test_noise_of_a_fifth_grows_once_in_a_hundred_runs_at_most_and_probes_of_every_step_do_not_shorten_the_window():
    assert sum(len(grows(growing(0.0, std=0.2, seed=seed))) for seed in range(100)) <= 1
    dense = fed(Growth(100, 1000), [v for v in growing(0.0, std=0.2, probes=1000)], start=0)
    assert not dense
    rule = Growth(100, 1000)
    assert fed(rule, growing(0.005, probes=1000), start=0) and len(rule.points) < 30


def young(steps, every, doubles_every, until):
    """Return lines of a run whose norms double every `doubles_every` steps up to step `until` and then stay
    constant."""
    names = ("q_norm/text/layer00", "k_norm/image/layer01", "final_norm/text")
    names += ("attn_logit_absmax/text-text/layer00",)
    for step in range(0, steps + 1, every):
        yield {"step": step} | dict.fromkeys(names, 60.0 * 2 ** (min(step, until) / doubles_every))


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("steps", [30, 150])
def test_a_short_run_has_too_few_steps_for_a_growth_alarm(steps, every):
    for until in (steps // 2, steps):
        assert not alarms_of(young(steps, every, steps / 12, until), 5, steps)
    # The control: stretched to twenty times the number of steps, this curve gives an alarm for all four series.
    found = alarms_of(young(20 * steps, 20, 20 * steps / 12, 10 * steps), 5, 20 * steps)
    assert [alarm.name for alarm in found] == ["growth"] * 4


def test_growth_in_the_first_hundred_steps_is_that_of_every_model_and_a_line_needs_fifty():
    first = fed(Growth(5, 220), [2 ** (min(step, 60) / 10) for step in range(221)], start=0)
    assert not first
    # Continued growth gives an alarm as soon as the fitted line covers enough steps, even if the run has no maximum
    # number of steps.
    for max_steps in (220, 0):
        found = fed(Growth(5, max_steps), [2 ** (step / 10) for step in range(400)], start=0)
        assert len(found) == 1 and 150 <= found[0].step <= 153


# Collapse -----------------------------------------------------------------------------------------------------


def test_collapse_comes_below_a_sixteenth_of_the_start():
    rule = Collapse()
    steps = [(0, 3.2, 20.0), (1, 0.21, 5.0), (2, 0.19, 4.0), (3, 0.1, 3.0), (4, 0.5, 3.0), (5, 0.15, 2.0)]
    found = [rule.update(step, "attn_entropy/text/layer01", value, rank) for step, value, rank in steps]
    assert [alarm is not None for alarm in found] == [False, False, True, False, False, True]
    assert found[2].threshold == pytest.approx(0.2)


# All of them --------------------------------------------------------------------------------------------------


def eventful_run(steps=1200, seed=0):
    """Return lines of a run with one event of each kind, and with series without events."""
    rng = random.Random(seed)
    lines = []
    for step in range(steps):
        line = {"step": step}
        if step == 0:
            line |= {"val_unigram/image": 6.0, "val_unigram/text": 6.0}
        else:
            text = 2.0 + 0.3 * math.exp(-step / 60) + rng.gauss(0, 0.01) + 1.5 * (step == 500)
            image = 6.5 + 0.3 * math.exp(-step / 60) + rng.gauss(0, 0.01) + 3.0 * (step > 1000)
            line |= {"loss": text + image, "loss/text": text, "loss/image": image}
            line["grad_norm"] = math.inf if step == 1150 else 1 + rng.gauss(0, 0.05) + 4 * (step == 700)
        if step % 20 == 0:
            calm = math.exp(rng.gauss(0, 0.02))
            line |= {
                "q_norm/text/layer00": 4 * calm,
                "q_norm/image/layer01": 4 * calm,
                "attn_logit_absmax/image-text/layer01": 40 * calm * 2 ** (step / 150),
                "attn_entropy/image/layer01": 3.0 * calm * (0.05 if step >= 800 else 1),
                "attn_rank/layer01": 9.0,
                "attn_entropy/text/layer00": 3.0 * calm,
            }
            if step == 1160:
                line["v_norm/text/layer01"] = line["k_norm/text/layer00"] = math.nan
        lines.append(line)
    return lines


EXPECTED = {
    ("spike", "loss"): 500,
    ("spike", "loss/text"): 500,
    ("spike_median", "loss"): 500,
    ("spike_median", "loss/text"): 500,
    ("spike", "grad_norm"): 700,
    ("growth", "attn_logit_absmax/image-text/layer01"): 400,
    ("collapse", "attn_entropy/image/layer01"): 800,
    ("non_finite", "grad_norm"): 1150,
    ("non_finite", "k_norm/text/layer00"): 1160,  # of the two layers with a NaN, the alarm names the lower one
}


def test_every_planted_event_is_named_with_its_step_series_and_nothing_else_rings():
    found = alarms_of(eventful_run(), warmup_steps=100, max_steps=1200)
    by_event = {(alarm.name, alarm.tag): alarm.step for alarm in reversed(found)}  # the first of each
    for event, step in EXPECTED.items():
        assert by_event.pop(event) == pytest.approx(step, abs=20 if event[0] == "growth" else 0), event
    stalled, diverged = by_event.pop(("stall", "loss/image")), by_event.pop(("divergence", "loss/image"))
    assert 100 + 240 <= stalled <= 600 and 1000 < diverged <= 1051
    # The rise of the image loss also counts as a spike at its start. Series without an event have no alarm.
    assert 1000 < by_event.pop(("rise", "loss/image")) < 1050
    rest = {(name, tag) for name, tag in by_event}
    assert rest <= {(name, tag) for name in ("spike", "spike_median", "rise") for tag in ("loss", "loss/image")}
    assert {alarm.name for alarm in found} == set(NAMES)
    image = next(alarm for alarm in found if alarm.name == "growth")
    assert image.where == "image to text, layer 1" and "layer01" in image.line()


def test_a_modality_that_is_not_trained_may_do_as_it_likes():
    found = alarms_of(eventful_run(), 100, 1200, trained=["text"])
    assert not any(alarm.tag == "loss/image" for alarm in found)
    assert any(alarm.tag == "loss/text" for alarm in found)


@pytest.mark.parametrize("cut", [99, 401, 801, 1151])
def test_a_resume_midway_gives_the_same_alarms(cut):
    lines = eventful_run()
    whole = alarms_of(lines, 100, 1200)
    first, second = AlarmRules(100, 1200), AlarmRules(100, 1200)

    def feed(rules, part):
        given = (rules.update(line["step"], {k: v for k, v in line.items() if k != "step"}) for line in part)
        return list(itertools.chain.from_iterable(given))

    before = feed(first, lines[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    after = feed(second, lines[cut:])
    assert repr(before + after) == repr(whole)
    # The control: rules without the stored state give different alarms.
    if 300 < cut < 1100:
        assert repr(before + feed(AlarmRules(100, 1200), lines[cut:])) != repr(whole)


# The file -----------------------------------------------------------------------------------------------------


def test_alarms_come_back_from_their_file_as_they_were(tmp_path):
    assert read_alarms(tmp_path) == []
    found = alarms_of(eventful_run(), 100, 1200)
    append_alarms(tmp_path, found[:3])
    append_alarms(tmp_path, [])
    append_alarms(tmp_path, found[3:])
    assert repr(read_alarms(tmp_path)) == repr(found)
    for line in (tmp_path / "alarms.jsonl").read_text().splitlines():
        assert json.loads(line, parse_constant=lambda _: pytest.fail("not JSON"))
    truncate_alarms(tmp_path, 500)
    assert read_alarms(tmp_path) == [alarm for alarm in found if alarm.step <= 500]
    truncate_alarms(tmp_path, -1)
    assert not (tmp_path / "alarms.jsonl").exists()


def test_a_file_that_cannot_be_read_is_not_removed(tmp_path, monkeypatch):
    alarm = Alarm("spike", 3, "loss", math.inf, 1.0, "a sentence")
    append_alarms(tmp_path, [alarm])
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.read_bytes", Mock(side_effect=OSError(errno.EIO, "error")))
        assert read_alarms(tmp_path) == []
        with pytest.raises(OSError, match="error"):
            truncate_alarms(tmp_path, 5)
    assert read_alarms(tmp_path) == [alarm]


WHOLE = '{"name":"spike","step":3,"tag":"loss","value":"inf","threshold":1.0,"sentence":"a sentence"}\n'


@pytest.mark.parametrize("damaged", ['{"name":"sp', "7", WHOLE.replace('"tag"', '"tags"')])
def test_a_line_that_is_damaged_is_left_out(tmp_path, damaged):
    alarm = Alarm("spike", 3, "loss", math.inf, 1.0, "a sentence")
    append_alarms(tmp_path, [alarm])
    path = tmp_path / "alarms.jsonl"
    assert path.read_text() == WHOLE
    for text in (f"{damaged.strip()}\n{WHOLE}", WHOLE + damaged.strip()):
        path.write_text(text)
        assert read_alarms(tmp_path) == [alarm]
