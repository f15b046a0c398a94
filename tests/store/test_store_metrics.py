"""Names of series, and metrics.jsonl."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys

import pytest

import mmqk.store.files
from mmqk.store import MetricsWriter, Tag, last_metrics, parse_tag, read_metrics, tag

# Names of series --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("built", "text", "parts"),
    [
        (tag("loss"), "loss", Tag("loss")),
        (tag("loss", "image"), "loss/image", Tag("loss", "image")),
        (tag("q_norm", "text", layer=3), "q_norm/text/layer03", Tag("q_norm", "text", 3)),
        (
            tag("attn_logit_absmax", "text", "image", layer=3, head=2),
            "attn_logit_absmax/text-image/layer03/head02",
            Tag("attn_logit_absmax", "text-image", 3, 2),
        ),
        (tag("attn_logit_bound", layer=0), "attn_logit_bound/layer00", Tag("attn_logit_bound", None, 0)),
        (tag("q_norm", "text", layer=120), "q_norm/text/layer120", Tag("q_norm", "text", 120)),
    ],
)
def test_tags_are_built_and_parsed_as_the_contract_writes_them(built, text, parts):
    assert built == text
    assert parse_tag(text) == parts


@pytest.mark.parametrize("text", ["", "/text", "q//layer03", "q/text/image/layer03", "q/text/head02"])
def test_what_is_not_a_tag_is_a_statistic(text):
    assert parse_tag(text) == Tag(text)


# metrics.jsonl ----------------------------------------------------------------------------------------------


def write(path, *lines):
    writer = MetricsWriter(path)
    for step, values in lines:
        writer.write(step, values)
    writer.close()


def write_steps(path, steps):
    write(path, *((step, {"loss": step / 8}) for step in steps))


def test_a_step_written_again_later_is_merged_on_reading(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write(10, {"loss": 1.0, "lr": 0.5})
    writer.flush()
    writer.write(11, {"loss": 2.0})
    writer.write(10, {"val_loss/text": 3.0, "lr": 0.75})
    writer.close()
    assert len(path.read_text().splitlines()) == 3
    assert read_metrics(path) == [
        {"step": 10, "loss": 1.0, "lr": 0.75, "val_loss/text": 3.0},
        {"step": 11, "loss": 2.0},
    ]


def test_values_that_are_not_finite_are_strings_in_the_file_and_floats_outside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    finite = {"d": 1e300, "e": 1 / 3, "f": 5e-324, "g": 3.4028234663852886e38}
    write(path, (1, {"a": math.nan, "b": math.inf, "c": -math.inf, **finite}))
    strict = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"not JSON: {name}"))
    assert strict == {"step": 1, "a": "nan", "b": "inf", "c": "-inf", **finite}
    (line,) = read_metrics(path)
    assert math.isnan(line["a"]) and line["b"] == math.inf and line["c"] == -math.inf
    assert last_metrics(path)["b"] == math.inf and finite.items() <= line.items()


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_cut_last_line_costs_that_line_only(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1, 2, 3])
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    lines = read_metrics(path)
    # A cut of 1 byte removes only the newline, so the line is complete. A longer cut damages it.
    expected = [1, 2, 3] if cut == 1 else [1, 2]
    assert [line["step"] for line in lines] == expected
    assert last_metrics(path)["step"] == expected[-1]
    write_steps(path, [4])
    assert [line["step"] for line in read_metrics(path)] == [*expected, 4]


def test_nothing_is_read_from_a_missing_or_empty_file(tmp_path):
    assert read_metrics(tmp_path / "none") == [] and last_metrics(tmp_path / "none") == {}
    (tmp_path / "empty").touch()
    assert read_metrics(tmp_path / "empty") == [] and last_metrics(tmp_path / "empty") == {}


def test_the_last_line_is_found_from_the_end_of_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(2000))
    assert last_metrics(path, tail_bytes=256) == {"step": 1999, "loss": 1999 / 8}
    write(path, (1999, {"val_loss/text": 2.0}))
    assert last_metrics(path) == {"step": 1999, "val_loss/text": 2.0}
    assert last_metrics(path, having="loss") == {"step": 1999, "loss": 1999 / 8}
    assert last_metrics(path, having="lr") == {}


def test_a_last_line_longer_than_the_tail_is_found(tmp_path):
    """A probe of a deep model writes lines of more than 64 KiB."""
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(10))
    probe = {f"q_norm/text/layer_{layer}": layer / 3 for layer in range(5000)}
    write(path, (10, probe))
    assert path.stat().st_size > 2 * 65536
    assert last_metrics(path) == {"step": 10, **probe}
    assert last_metrics(path, having="loss") == {"step": 9, "loss": 9 / 8}


def test_truncate_after_keeps_every_line_up_to_the_step_and_writing_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for step in (1, 2, 3, 4):
        writer.write(step, {"loss": float(step)})
    writer.write(2, {"val_loss/text": 9.0})
    before = path.read_bytes().splitlines()
    writer.truncate_after(2)
    assert path.read_bytes().splitlines() == [*before[:2], b'{"step":2,"val_loss/text":9.0}']
    writer.write(5, {"loss": 5.0})
    writer.truncate_after(3)  # the values that are not written yet are dropped too
    writer.write(3, {"loss": 30.0})
    writer.close()
    assert [(line["step"], line["loss"]) for line in read_metrics(path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_failing_truncation_leaves_the_file_and_the_writer_whole(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1, 2, 3])
    before = path.read_bytes()
    writer = MetricsWriter(path)

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(mmqk.store.files.os, "replace", full_disk)
        with pytest.raises(OSError):
            writer.truncate_after(1)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    writer.write(4, {"loss": 4.0})
    writer.close()
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4]


KILLED = """
import sys
from mmqk.store import MetricsWriter
path = sys.argv[1]
print("go", flush=True)
while True:
    writer = MetricsWriter(path)
    for step in range(20, 60):
        writer.write(step, {"loss": 1.0, "pad": 2.0})
    writer.truncate_after(19)
    writer.close()
"""


@pytest.mark.parametrize("wait", [0.02, 0.05, 0.09])
def test_a_kill_while_truncating_never_loses_the_lines_kept(tmp_path, wait):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(20))
    kept = path.read_bytes()
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"go\n"
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(wait)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert path.read_bytes().startswith(kept)
    writer = MetricsWriter(path)
    writer.truncate_after(19)
    writer.close()
    assert path.read_bytes() == kept
