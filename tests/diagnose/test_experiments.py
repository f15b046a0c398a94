"""Experiments on two tiny planted failures: bad sequences, which leaving them out mends, and a learning rate that is
too high, which it does not."""

from __future__ import annotations

import re

import pandas as pd
import pytest

from mmqk.diagnose.experiments import ARMS, CONTROL, Event, _table, run
from mmqk.store import UserError
from mmqk.train import main

ARGS = ["--config=configs/dial.yaml", "--config=configs/failures/zoo_base.yaml", "--data.batch_size=4",
        "--model.d_model=16", "--model.n_layers=1", "--monitor.every_n_steps=100", "--logging=[]",
        "--trainer.max_steps=260", "--checkpoint.at=[100]", "--quiet"]  # fmt: skip
PATCH = "tests.diagnose.failures:bad_sequences"


@pytest.mark.slow
def test_bad_sequences(tmp_path):
    assert main([*ARGS, f"--data.patch={PATCH}", f"--out={tmp_path / 'run'}"]) in (0, 3)
    _, table, notes = run(tmp_path / "run", None, {"data.patch": PATCH})
    assert list(table.index) == list(ARMS) and " from step 100 " in notes[1]
    gone = table["outcome"]
    assert gone[CONTROL] == gone["noise"] == gone["moments"] == "remains"
    assert gone["batches"] == gone["sequences"] == "gone"
    first, last = map(int, re.findall(r"\d+", notes[2]))
    assert first <= 600 and last >= 759  # the bad ones: tests.diagnose.failures.BAD
    with pytest.raises(UserError, match=r"no checkpoint before step 50: write one with .*--checkpoint.at"):
        run(tmp_path / "run", 51, {"data.patch": PATCH})


@pytest.mark.slow
def test_a_learning_rate_that_is_too_high(tmp_path):
    """The control of the test above: other sequences, or fewer of them, do not mend it, a lower learning rate does."""
    main([*ARGS, f"--out={tmp_path / 'parent'}"])
    parent = f"--fork={tmp_path / 'parent/checkpoints/step00000100.ckpt'}"
    fields = ["--optim.lr=1", "--trainer.max_steps=180", "--checkpoint.keep=9"]
    assert main([parent, *fields, "--quiet", f"--out={tmp_path / 'run'}"]) == 0
    gone = run(tmp_path / "run", 105, {})[1]["outcome"]
    assert gone[CONTROL] == gone["noise"] == gone["batches"] == gone["sequences"] == "remains"
    assert gone["slower"] == "gone"


def test_the_rule_on_known_series():
    """Half of the control's rise decides, also for a value that is not finite and for a series that falls."""

    def table(tag, before, **values):
        found = {name: pd.DataFrame({tag: series}) for name, series in values.items()}
        return _table(found, Event(9, tag, ""), before)["outcome"].to_dict()

    low, high, middle = [1.0] * 9, [1.0, *[5.0] * 8], [1.0, *[2.9] * 8]
    assert table("loss", 1.0, same=high, noise=low, slower=middle, moments=[1.0, *[3.1] * 8]) == {
        "same": "remains", "noise": "gone", "slower": "gone", "moments": "remains"}  # fmt: skip
    assert table("loss", 1.0, same=[1.0, *[float("inf")] * 8], noise=high) == {"same": "remains", "noise": "gone"}
    falling = table("attn_entropy/text/layer00", -3.0, same=[3.0, *[0.5] * 8], noise=[3.0, *[2.5] * 8])
    assert falling == {"same": "remains", "noise": "gone"}
    assert table("loss", 1.0, same=low, noise=high)["same"] == "gone"
