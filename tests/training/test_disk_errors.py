"""If any file operation of a run fails, the run prints one sentence, sets a correct status, and loses no data."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from mmqk.store import Alarm, AlarmRules, cli_main, read_alarms, read_status
from mmqk.train import main
from tests.faulty_disk import Disk, Site
from tests.soak.file_layer import judge
from tests.training import runs
from tests.training.runs import series, weights

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc for names of open files")
PARTS = 5  # coprime to the periods 2 and 3 of the loop below
ALARM = Alarm("stall", 3, "loss/text", 1.0, 0.5, "made up")


@pytest.fixture(autouse=True, scope="module")
def one_alarm():
    """Give each run an alarm, so that it writes alarms.jsonl."""
    update = AlarmRules.update
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AlarmRules, "update", lambda self, step, seen: update(self, step, seen) + [ALARM] * (step == 3))
        yield


@pytest.fixture(scope="module")
def args(tiny_args) -> list[str]:
    return [*tiny_args, "--trainer.max_steps=4", "--checkpoint.every_n_steps=2", "--checkpoint.keep=1",
            "--monitor.every_n_steps=2", "--monitor.probe_sequences=1", "--data.val_sequences=2"]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(args, one_alarm, tmp_path_factory) -> tuple[Path, list[tuple[Site, int]]]:
    """Return the folder of a run, and the index of the last call of each kind of file operation."""
    whole = tmp_path_factory.mktemp("undisturbed") / "run"
    with Disk(whole).mounted() as disk:
        assert main([*args, f"--out={whole}"]) == 0
    return whole, sorted(disk.seen.items())


def same(one: Path, other: Path) -> bool:
    return runs.same(weights(one), weights(other)) and all(read(one) == read(other) for read in (series, read_alarms))


def test_the_disk_sees_what_a_run_writes(undisturbed):
    operations, names = zip(*(site for site, _ in undisturbed[1]), strict=True)
    for wanted in ("metrics.jsonl", "alarms.jsonl", "checkpoints/step0.ckpt", "run.lock", "events.out."):
        assert wanted in names
    assert {"write", "fsync", "replace", "mkdir", "unlink"} <= set(operations) and len(names) > 30


def test_another_run_is_not_the_same(args, undisturbed, tmp_path):
    """The control of the tests below."""
    assert main([*args, "--seed=1", f"--out={tmp_path}"]) == 0
    assert not same(tmp_path, undisturbed[0])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_file_operation_of_a_run_may_fail(args, undisturbed, tmp_path, capfd, part):
    """The first or the last operation of each kind fails, alone or together with all later writes."""
    whole, sites = undisturbed
    for i, (site, last) in list(enumerate(sites))[part::PARTS]:
        out = tmp_path / f"run{i}"
        code, full = (errno.ENOSPC, errno.EIO)[i % 2], i % 3 == 0
        nth = last if i % 2 else 0
        capfd.readouterr()
        with Disk(out, site, nth, code, full).mounted() as disk:
            ended = cli_main(main)([*args, f"--out={out}"])
        said = capfd.readouterr().err
        print(site, nth, code, "full" if full else "", ended, said)  # pytest shows it if an assertion fails
        judge(ended, "stays full" if full else "once", said, "run", out, None, steps=4)
        ours = [line for line in said.splitlines() if line.startswith("mmqk: ")]
        assert (disk.failed and str(out) in ours[0]) if ended else read_status(out).status == "completed" and not ours
        assert cli_main(main)([*args, f"--out={out}"]) == 0 and same(out, whole)


def test_a_checkpoint_that_the_disk_does_not_give_is_not_taken_for_a_damaged_one(args, undisturbed, tmp_path, capfd):
    out = tmp_path / "run"
    shutil.copytree(undisturbed[0], out)
    (out / "status.json").write_text('{"status": "running", "step": 4}')
    with Disk(out, ("read", "checkpoints/step0.ckpt"), code=errno.EIO).mounted() as disk:
        assert cli_main(main)([*args, f"--out={out}"]) == 1
    said = capfd.readouterr().err
    assert disk.failed and "step00000004.ckpt cannot be read or written (Input/output error)" in said
    assert "Traceback" not in said and read_status(out).status == "failed"
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["step00000004.ckpt"]
    assert cli_main(main)([*args, f"--out={out}"]) == 0 and same(out, undisturbed[0])
