"""Files: damaged records, a failing disk, the files that ship with mmqk, and how commands end."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from mmqk import report
from mmqk.config import resolve
from mmqk.store import (
    GRIDS,
    MetricsWriter,
    RunFolder,
    UserError,
    cli_main,
    find_file,
    named_config,
    read_json,
    read_metrics,
    read_status,
    with_configs,
    write_folder,
    write_json,
)
from mmqk.watch import main as watch
from tests.faulty_disk import WRITES, Disk
from tests.lab.fake_runs import write_demo

# Damaged records --------------------------------------------------------------------------------------------


DAMAGE = {"cut": b'{"a": ', "bytes": b'{"a": "\xff"}', "empty": b"", "list": b"[1]"}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_cannot_be_a_record_is_one_sentence_that_names_the_file(tmp_path, name):
    path = tmp_path / "x.json"
    path.write_bytes(DAMAGE[name])
    with pytest.raises(UserError, match=r"x\.json cannot be read \(.+\): ask") as refusal:
        read_json(path, "ask")
    assert len(str(refusal.value)) < 300 + len(str(path)) and "\n" not in str(refusal.value)
    path.write_text('{"a": "x"}')
    assert read_json(path) == {"a": "x"}


def test_what_is_written_can_be_read(tmp_path):
    write_json(tmp_path / "x.json", {"a": [float("nan"), float("inf"), 1.5], "é": {"b": -float("inf")}})
    assert read_json(tmp_path / "x.json") == {"a": ["nan", "inf", 1.5], "é": {"b": "-inf"}}


@pytest.mark.usefixtures("without_figures")
def test_a_damaged_record_of_a_run_is_named_on_the_page_without_its_folder(tmp_path, capsys):
    folder = write_demo(tmp_path / "grid")

    def page() -> str:
        assert cli_main(report.main)([str(folder), "--out", str(tmp_path / "page")]) == 0
        return (tmp_path / "page/report.md").read_text()

    # The control: without damage nothing is reported.
    assert "cannot be read" not in page() and "is missing" not in page()
    assert cli_main(watch)(["--once", str(folder)]) == 0
    assert "damaged: " not in capsys.readouterr().out
    arms = {"run.json": "mixed-0*", "status.json": "mixed-qk*", "data.json": "image-off*", "fork.json": "high-pre-0*"}
    for name, arm in arms.items():
        next(folder.glob(f"{arm}/seed0")).joinpath(name).write_text('{"share": ')
    text = page()
    for name in arms:
        assert f"ts {name} cannot be read: it is not JSON" in text, name
    assert str(tmp_path) not in text


# A failing disk ---------------------------------------------------------------------------------------------


FILES = {"index.html": "page", "figures/a.png": b"picture", "figures/a.csv": "1,2"}


def content(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("there", [False, True], ids=["new folder", "folder of before"])
def test_a_folder_is_written_whole_or_is_as_it_was(tmp_path, there):
    def before(out: Path) -> Path:
        if there:
            (out / "figures").mkdir(parents=True)
            (out / "figures/a.csv").write_text("old")
            (out / "mine.txt").write_text("mine")
        return out

    (tmp_path / "good").mkdir()
    out = before(tmp_path / "good/reports/out")
    with Disk(tmp_path / "good").mounted() as disk:
        write_folder(out, FILES)
    new = {"index.html": "page", "figures/a.png": "picture", "figures/a.csv": "1,2"}
    assert content(out) == (new | {"mine.txt": "mine"} if there else new)
    assert sorted(p.name for p in out.parent.iterdir()) == ["out"]
    # Renames are left out: they need no disk space, so they succeed on a full disk.
    sites = [(site, last) for site, last in disk.seen.items() if site[0] in WRITES - {"replace"}]
    assert len(sites) >= 4
    for i, (site, last) in enumerate(sites):
        for nth in {0, last}:
            root = tmp_path / f"bad{i}-{nth}"
            root.mkdir()
            out = before(root / "reports/out")
            kept = content(root)
            with Disk(root, site, nth, errno.ENOSPC, True).mounted() as bad, pytest.raises(OSError):
                write_folder(out, FILES)
            assert bad.failed and content(root) == kept, (site, nth)


def test_a_status_that_ends_a_run_stands_where_the_last_one_stood_on_a_full_disk(tmp_path):
    with RunFolder.open(tmp_path, {"seed": 0}, {}) as folder:
        folder.set_status("running", 3)
        site = ("open for writing", ".status.json.0.mmqk-tmp")
        with Disk(tmp_path, site, stays_full=False).mounted(), pytest.raises(OSError, match=r"status\.json"):
            folder.set_status("running", 4)
        assert read_status(tmp_path).step == 3
        with Disk(tmp_path, site).mounted():
            folder.set_status("failed", 4, "no room")
        status = read_status(tmp_path)
        assert (status.status, status.step, status.reason) == ("failed", 4, "no room")


def test_a_line_that_could_not_be_written_is_not_written_later(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write(1, {"loss": 2.0})
    writer.flush()
    with Disk(tmp_path, ("write", "metrics.jsonl")).mounted():
        full = MetricsWriter(path)
        full.write(2, {"loss": 1.0})
        with pytest.raises(OSError) as caught:
            full.flush()
        assert caught.value.filename == str(path)
    del full
    writer.close()
    assert [line["step"] for line in read_metrics(path)] == [1]


# Files that ship with mmqk ----------------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]
SMALL = ["--data.seq_len=96", "--trainer.max_steps=2"]


@pytest.fixture
def empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_of_the_working_directory_comes_first(empty):
    assert find_file("data/emoji") == ROOT / "data/emoji"
    (empty / "data/emoji").mkdir(parents=True)
    assert find_file("data/emoji") == Path("data/emoji")
    assert find_file("data/text") == ROOT / "data/text"  # the user has no data/text


def test_a_config_by_name(empty):
    assert named_config("demo") == ROOT / "configs/demo.yaml"
    assert named_config("recipes/olmo2") == ROOT / "configs/recipes/olmo2.yaml"
    assert named_config("demo", GRIDS) == ROOT / "configs/ablations/demo.yaml"
    assert named_config("configs/cpu.yaml") == ROOT / "configs/cpu.yaml"
    assert named_config("nothing") is None
    (empty / "demo").write_text("seed: 1\n")
    assert named_config("demo") == Path("demo")


def test_a_command_line_with_names(empty):
    demo, cpu = str(ROOT / "configs/demo.yaml"), str(ROOT / "configs/cpu.yaml")
    assert with_configs(["demo", "seed=1"]) == ["--config", demo, "seed=1"]
    assert with_configs(["--config", "demo", "--config=cpu"]) == ["--config", demo, f"--config={cpu}"]
    unchanged = ["seed=1", "--out", "demo", "--config=missing.yaml"]
    assert with_configs(unchanged) == unchanged
    with pytest.raises(UserError, match=r"^nothing is neither a file .*one of cpu, demo, .*recipes/olmo2"):
        with_configs(["nothing"])


def test_a_grid_is_not_trained_as_one_run(empty):
    (empty / "grid.yaml").write_text("name: mine\narms: {a: {}}\n")
    (empty / "run.yaml").write_text("data: {}  # no arms: here\n")
    for given in ("grid.yaml", "tournament", "configs/ablations/demo.yaml"):
        for argv in ([given], ["--config", given], ["demo", given], [f"--config={given}"]):
            with pytest.raises(UserError, match=rf"^{given} is a grid .*: train it with mmqk ablate {given}$"):
                with_configs(argv)
    assert with_configs(["grid.yaml"], GRIDS) == ["--config", "grid.yaml"]
    assert with_configs(["run.yaml"]) == ["--config", "run.yaml"]


def test_the_demonstration_resolves_in_an_empty_folder_as_in_the_repository(empty, monkeypatch):
    elsewhere = resolve(["demo", *SMALL])
    monkeypatch.chdir(ROOT)
    assert elsewhere.id == resolve(["--config", "configs/demo.yaml", *SMALL]).id
    assert elsewhere.out.parent == Path("runs/demo")


# How commands end -------------------------------------------------------------------------------------------


def test_a_defect_of_ours_keeps_its_traceback():
    @cli_main
    def main(argv):
        raise KeyError("ours")

    with pytest.raises(KeyError):
        main([])


def test_exit_codes_pass_and_ctrl_c_is_130():
    def interrupted(argv):
        raise KeyboardInterrupt

    assert cli_main(lambda argv: 3)([]) == 3
    assert cli_main(interrupted)([]) == 130


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_goes_away_leaves_no_traceback(lines):
    code = (
        "from mmqk.store import run_main\n"
        "def main(argv):\n"
        f"    print('line\\n' * {lines})\n"
        "    return 0\n"
        "run_main(main)\n"
    )
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    child = subprocess.Popen([sys.executable, "-c", f"input()\n{code}"], **pipes)
    child.stdout.close()
    child.stdin.write(b"\n")
    child.stdin.close()
    assert child.stderr.read() == b""
    assert child.wait() == 141
