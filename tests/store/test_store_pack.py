"""A pack gives the same report as the folder of its runs, a grid can continue from a pack, and unpacking writes no
file outside the folder for the runs."""

import io
import json
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

import mmqk
from mmqk.lab.metrics import METRICS
from mmqk.lab.runs import Run
from mmqk.report import main as report
from mmqk.store import cli_main
from mmqk.store.pack import REPORTED, unpacked, write_pack
from tests.lab.fake_runs import write_demo


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_demo(tmp_path_factory.mktemp("packs") / "demo")


@pytest.fixture
def packed(folder, tmp_path):
    write_pack(folder, tmp_path / "demo.zip")
    return tmp_path / "demo.zip"


def files(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.usefixtures("without_figures")
def test_the_report_of_a_pack_is_that_of_the_folder(folder, packed, tmp_path):
    for runs, out in ((folder, "a"), (packed, "b")):
        assert report([str(runs), "--out", str(tmp_path / out)]) == 0
    assert files(tmp_path / "a") == files(tmp_path / "b") != {}
    # The control: a changed number in a metrics file changes the report.
    changed = tmp_path / "changed/demo"
    shutil.copytree(folder, changed)
    metrics = next(changed.glob("mixed-0*/seed0/metrics.jsonl"))
    metrics.write_text(metrics.read_text().replace('absmax/text-text/layer00": ', 'absmax/text-text/layer00": 9'))
    assert report([str(changed), "--out", str(tmp_path / "c")]) == 0
    assert files(tmp_path / "c") != files(tmp_path / "a")


def test_two_packs_of_the_same_runs_are_the_same_bytes(folder, packed, tmp_path):
    copy = tmp_path / "elsewhere/demo"
    shutil.copytree(folder, copy)
    (next(copy.rglob("run.json")).parent / "checkpoints").mkdir()
    write_pack(copy, tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == packed.read_bytes()
    (next(copy.rglob("status.json"))).write_text('{"status": "failed"}')
    write_pack(copy, tmp_path / "other.zip")
    assert (tmp_path / "other.zip").read_bytes() != packed.read_bytes()


def test_load_runs_reads_a_pack(folder, packed):
    of_folder, of_pack = mmqk.load_runs(folder), mmqk.load_runs(packed)
    assert of_pack.metrics().equals(of_folder.metrics())
    assert of_pack.verdicts().equals(of_folder.verdicts()) and len(of_pack) == len(of_folder)


def test_a_run_alone_can_be_packed(folder, tmp_path):
    run = next(folder.glob("mixed-0*/seed0"))
    write_pack(run, tmp_path / "run.zip")
    (read,) = mmqk.load_runs(tmp_path / "run.zip")
    assert read.status.status == "completed" and len(read.series("loss/text")[0])


@pytest.mark.usefixtures("without_figures")
def test_a_small_pack_has_what_a_report_reads_with_fewer_digits(folder, tmp_path):
    write_pack(folder, tmp_path / "whole.zip")
    write_pack(folder, tmp_path / "small.zip", small=True)
    assert (tmp_path / "small.zip").stat().st_size < (tmp_path / "whole.zip").stat().st_size
    for one, two in zip(*(mmqk.load_runs(tmp_path / f"{n}.zip") for n in ("whole", "small")), strict=True):
        reported = [name for name in one.tags if name.partition("/")[0] in REPORTED or name.startswith("val_")]
        assert sorted(two.tags) == sorted(reported)
        for name in reported:
            near = {"abs": 5e-4} if name.startswith(("loss", "excess")) else {"rel": 5e-5}
            assert two.series(name)[1] == pytest.approx(one.series(name)[1], **near, nan_ok=True)
        assert json.loads((two.path / "thinned.json").read_text())["digits"] == 5
    write_pack(unpacked(tmp_path / "small.zip"), tmp_path / "again.zip", small=True)
    assert (tmp_path / "again.zip").read_bytes() == (tmp_path / "small.zip").read_bytes()


def test_a_thin_pack_has_the_mean_loss_of_each_ten_steps(tmp_path):
    lines = [{"step": s, "loss/text": 9 - s / 10, "loss/image": "nan", "q_norm": 1.0, "lr": 1.0} for s in range(1, 15)]
    del lines[9]["loss/text"]  # a batch without text
    lines[11:11] = [{"step": 11, "loss/text": 2.0}]  # after a resume: the later value counts
    run = tmp_path / "runs/seed0"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_pack(tmp_path / "runs", tmp_path / "thin.zip", small=True, only=["loss", "q_norm"], steps=10)
    (thin,) = mmqk.load_runs(tmp_path / "thin.zip")
    steps, losses = thin.series("loss/text")
    assert steps.tolist() == [1, 9, 14]
    assert losses == pytest.approx([8.9, 8.45, (2 + 7.8 + 7.7 + 7.6) / 4], abs=5e-4)
    assert np.isnan(thin.series("loss/image")[1]).all()
    assert thin.series("q_norm")[0].tolist() == list(range(1, 15)) and "lr" not in thin.tags


@pytest.mark.usefixtures("without_figures")
def test_a_report_reads_no_series_that_a_small_pack_lacks(monkeypatch, tmp_path):
    read = set()
    series = Run.series
    monkeypatch.setattr(Run, "series", lambda run, name: read.add(name) or series(run, name))
    shipped = Path(__file__).parents[2] / "reports/examples/demo.zip"
    assert report([str(shipped), "--out", str(tmp_path / "page")]) == 0
    run = next(iter(mmqk.load_runs(shipped)))
    for metric in METRICS.values():
        for modality in ("text", None):
            metric.measure(run, modality), metric.series(run, modality)
    statistics = {name.partition("/")[0] for name in read}
    assert {"loss", "attn_logit_absmax", "val_loss"} <= statistics
    missing = {name for name in statistics if name not in REPORTED and not name.startswith("val_")}
    assert not missing, "add them to mmqk.store.pack.REPORTED"


def test_metrics_are_stored_as_columns_and_restored_byte_for_byte(folder, tmp_path):
    copy = tmp_path / "demo"
    shutil.copytree(folder, copy)
    first, second = sorted(copy.rglob("metrics.jsonl"))[:2]
    first.write_text(
        '{"step":0,"loss":1.5,"q_norm":"nan"}\n{"step":1,"q_norm":-0.0,"loss":1e-300}\n{"step":1,"alarm":1}\n'
    )
    second.write_text('{"step":0,"loss":1.5}\n{"step":1,"lo')  # a line that cannot be read
    write_pack(copy, tmp_path / "demo.zip")
    restored = unpacked(tmp_path / "demo.zip")
    for path in copy.rglob("metrics.jsonl"):
        assert (restored / path.relative_to(copy)).read_bytes() == path.read_bytes()
    with (
        zipfile.ZipFile(tmp_path / "demo.zip") as archive,
        tarfile.open(fileobj=io.BytesIO(archive.read("runs.tar"))) as tar,
    ):
        names = tar.getnames()
    as_lines = {name for name in names if name.endswith("metrics.jsonl")}
    assert second.relative_to(copy).as_posix() in as_lines and first.relative_to(copy).as_posix() not in as_lines


def of_other_files(whole: bytes) -> bytes:
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("a/run.json", "{}")
    return zipped.getvalue()


@pytest.mark.parametrize("change", [
    lambda whole: b"", lambda whole: b"no zip", lambda whole: whole[: len(whole) // 2],
    lambda whole: whole[:2000] + b"x" * 500 + whole[2500:], of_other_files,
])  # fmt: skip
def test_a_damaged_file_is_one_sentence(packed, tmp_path, capsys, change):
    packed.write_bytes(change(packed.read_bytes()))
    assert cli_main(report)([str(packed), "--out", str(tmp_path / "page")]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"mmqk: {packed} cannot be read as a pack (")
    assert sentence.endswith("): give a file that mmqk pack has written")
    assert not (tmp_path / "page").exists()


def test_a_pack_has_no_absolute_path_in_its_commands(folder, tmp_path):
    copy = tmp_path / "demo"
    shutil.copytree(folder, copy)
    path = next(copy.rglob("run.json"))
    record = json.loads(path.read_text())
    command = ["python", "-m", "mmqk.train", "--config", "/home/me/lab/configs/demo.yaml", "--seed=1"]
    record["details"]["command"] = command
    path.write_text(json.dumps(record))
    write_pack(copy, tmp_path / "demo.zip")
    found = json.loads((unpacked(tmp_path / "demo.zip") / path.relative_to(copy)).read_text())
    assert found["details"]["command"] == [*command[:4], "configs/demo.yaml", "--seed=1"]
    assert found["identity"] == record["identity"] and found["id"] == record["id"]
    with zipfile.ZipFile(tmp_path / "demo.zip") as archive:
        assert not any(b"/home/me" in archive.read(name) for name in archive.namelist())
    assert "/home/me" in path.read_text()  # the control
