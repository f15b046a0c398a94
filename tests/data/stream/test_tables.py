"""Parquet and Arrow files as shards of text: the same texts as JSON lines, from any row on."""

from __future__ import annotations

import json

import pytest

from mmqk.data.shards.read import ShardError, samples_of
from mmqk.data.shards.samples import text_of

pa = pytest.importorskip("pyarrow")
TEXTS = [f"text {n} \N{SNOWMAN}\n" for n in range(2500)]


@pytest.fixture(params=["parquet", "arrow"])
def table(request, tmp_path):
    def write(columns):
        path, made = tmp_path / f"a.{request.param}", pa.table(columns)
        if request.param == "parquet":
            import pyarrow.parquet as pq

            pq.write_table(made, path, row_group_size=700)
        else:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, made.schema) as writer:
                writer.write_table(made, max_chunksize=900)
        return str(path)

    return write


def test_rows_are_those_of_json_lines(table, tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    path = table({"url": ["x"] * len(TEXTS), "text": TEXTS})
    of_lines = [(s.number, text_of(s.fields["line"])) for s in samples_of(str(lines))]
    assert [(s.number, text_of(s.fields["line"])) for s in samples_of(path)] == of_lines
    for number in (1, 699, 700, 1023, 1024, 2499):
        again = [(s.number, text_of(s.fields["line"])) for s in samples_of(path, 0, number)]
        assert again == of_lines[number:] and again != of_lines[number - 1 :]
    assert [s.number for s in samples_of(path, 0, 0, 3, 1)] == list(range(1, 2500, 3))


def test_a_damaged_table_or_one_without_text_is_said(table):
    with pytest.raises(ShardError, match="no column text"):
        list(samples_of(table({"content": TEXTS})))
    path = table({"text": TEXTS})
    with open(path, "r+b") as file:
        file.truncate(2000)
    with pytest.raises(ShardError):
        list(samples_of(path))
