"""A stand-in for training, so that what surrounds a run is tested without one."""

import os
from pathlib import Path

import pytest

FAKE = '''
"""A stand-in for mmqk.train: one step is a line of metrics, and what happens is in the arguments."""
import argparse, os, signal, sys, time
from mmqk.store import EXIT_CODES, MetricsWriter, RunFolder, UserError

IMPORTED_IN = os.getpid()
STEPS = 4

def identity_of(act, seed):
    return {"act": act, "seed": seed, "trainer": {"max_steps": STEPS}}

def main(argv):
    p = argparse.ArgumentParser()
    p.add_argument("--config", action="append")
    p.add_argument("--seed", type=int)
    p.add_argument("--out")
    p.add_argument("--quiet", action="store_true")
    p.add_argument("--act", default="finish")
    p.add_argument("--threads")
    a = p.parse_args(argv)
    print("argv", argv, "preloaded", IMPORTED_IN != os.getpid())
    os.system("echo from a subprocess")
    if a.act == "refuse":
        raise UserError("the shard is missing: build it")
    with RunFolder.open(a.out, identity_of(a.act, a.seed), {}) as run:
        writer = MetricsWriter(run.metrics_path)
        first = run.status().step if run.state == "resume" else 0
        try:
            for step in range(first + 1, STEPS + 1):
                writer.write(step, {"loss": 8.0 - step})
                writer.flush()
                if step == 2 and a.act == "raise":
                    raise RuntimeError("the arm is broken")
                if step == 2 and a.act == "sigkill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if step == 2 and a.act == "diverge":
                    run.set_status("diverged", step, "text loss became nan")
                    return EXIT_CODES["diverged"]
                if step == 2 and a.act in ("hang", "deaf"):
                    if a.act == "deaf":
                        signal.signal(signal.SIGINT, signal.SIG_IGN)
                    run.set_status("running", step)
                    while not os.path.exists(os.path.join(os.path.dirname(a.out), "let-go")):
                        time.sleep(0.02)
        except KeyboardInterrupt:
            time.sleep(0.3)  # a second SIGINT would cut this short
            run.set_status("interrupted", step, "SIGINT")
            return 130
        run.set_status("completed", STEPS)
    return 0
'''


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    """The stand-in as module fake_train, on the path of this process and of those it starts."""
    folder = tmp_path_factory.mktemp("fake")
    (folder / "fake_train.py").write_text(FAKE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(Path(__file__).parents[2])]))
        yield folder
