"""A replacement for mmqk.train and mmqk.config: a step writes a line of metrics, and the field `act` sets how the run
ends."""

import json
import os
import signal
import time
import types
from collections import namedtuple
from pathlib import Path

from mmqk.store import EXIT_CODES, MetricsWriter, RunFolder, UserError, identity_hash

IMPORTED_IN = os.getpid()
STEPS = 4
FIELDS = {
    "act": "finish", "seed": 0, "size": 1, "bad": 2, "threads": 0, "backend": "sdpa",
    "optim.lr": 0.1, "trainer.max_steps": STEPS, "trainer.precision": "32-true", "optim.schedule_steps": None,
    "checkpoint.at": [], "fork_skip_batches": 0, "fork_noise": 0.0, "fork_seed": 0, "fork": None, "out": None,
}  # fmt: skip
OUTSIDE = ("seed", "threads", "checkpoint.at", "fork", "out")
Parent = namedtuple("Parent", "id step config")


def identity_of(act, seed, **fields):
    """Return the identity of a run: only fields that differ from their default are part of it."""
    values = {k: v for k, v in fields.items() if v != FIELDS[k] and k not in OUTSIDE and "." not in k}
    record = {"act": act, "seed": seed, "backend": fields.get("backend", "sdpa"), **values}
    record["trainer"] = {"max_steps": fields.get("trainer.max_steps", STEPS)}
    more = {k: v for k, v in fields.items() if k in ("optim.lr", "trainer.precision", "optim.schedule_steps")}
    return record | {k: v for k, v in more.items() if v != FIELDS[k]}


def resolve(argv, parent=None):
    given, argv = {}, list(argv)
    while argv:
        name, equals, value = argv.pop(0).removeprefix("--").partition("=")
        if name == "quiet":
            continue
        value = value if equals else argv.pop(0)
        if name == "config":
            given |= json.loads(Path(value).read_text() or "{}")
        elif name not in FIELDS:
            raise UserError(f"There is no field '{name}'")
        else:
            given[name] = value if isinstance(FIELDS[name], str) or name in ("fork", "out") else json.loads(value)
    if parent is None and given.get("fork"):
        saved = json.loads(Path(given["fork"]).read_text())
        parent = Parent(saved["id"], saved["step"], saved["config"])
    base = {} if parent is None else {k: v for k, v in parent.config["flat"].items() if "fork" not in k}
    config = {**FIELDS, **base, "checkpoint.at": [], **given}
    if config["act"] == "odd" and config["seed"] == 13:
        raise UserError("seed 13 is odd")
    identity = identity_of(**{k.replace(" ", ""): v for k, v in config.items()})
    if parent is not None:
        for name in ("fork_skip_batches", "fork_noise", "fork_seed"):
            identity.pop(name, None)
        own = {k: config["fork_" + k] for k in ("skip_batches", "noise", "seed")}
        identity["fork"] = {"parent": parent.id, "step": parent.step, **own}
    flat = {k: v for k, v in config.items() if k not in ("out", "fork")}
    return types.SimpleNamespace(
        identity=identity,
        id=identity_hash(identity),
        threads=config["threads"],
        model=types.SimpleNamespace(vocab_sizes={"text": 5, "image": 5}),
        config=config,
        nested=lambda: {"flat": flat, "checkpoint": {"at": config["checkpoint.at"]}},
        parent=parent,
    )


def main(argv):
    a = resolve(argv)
    c, act = a.config, a.config["act"]
    print("argv", argv, "preloaded", os.getpid() != IMPORTED_IN)
    print("device", os.environ.get("CUDA_VISIBLE_DEVICES"))
    os.system("echo from a subprocess")
    if act == "refuse":
        raise UserError("the shard is missing: build it")
    with RunFolder.open(c["out"], a.identity, {}) as run:
        if run.state == "finished":
            return 0
        (run.path / "config.yaml").write_text(json.dumps({k: c[k] for k in c if k not in ("out", "fork")}))
        writer = MetricsWriter(run.metrics_path)
        first = run.status().step if run.state == "resume" else a.parent.step if a.parent else 0
        steps = c["trainer.max_steps"]
        bad = c["bad"] if act == "diverge" else 0
        try:
            for step in range(first + 1, steps + 1):
                lr = c["optim.lr"]
                writer.write(step, {"loss": 8.0 - step, "loss/text": abs(lr - 0.03) + c["seed"]})
                writer.flush()
                if step == 2 and act == "raise":
                    raise RuntimeError("the arm is broken")
                if step == 2 and act == "sigkill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if step == bad:
                    run.set_status("diverged", step, "text loss became nan")
                    return EXIT_CODES["diverged"]
                if step in c["checkpoint.at"]:
                    run.checkpoints.mkdir(exist_ok=True)
                    saved = {"id": a.id, "step": step, "config": a.nested()}
                    (run.checkpoints / f"step{step:08d}.ckpt").write_text(json.dumps(saved))
                if step == 2 and act in ("hang", "deaf"):
                    if act == "deaf":
                        signal.signal(signal.SIGINT, signal.SIG_IGN)
                    run.set_status("running", step)
                    while not os.path.exists(os.path.join(os.path.dirname(c["out"]), "let-go")):
                        time.sleep(0.02)
        except KeyboardInterrupt:
            time.sleep(0.3)  # a second SIGINT would interrupt this sleep
            run.set_status("interrupted", step, "SIGINT")
            return 130
        run.set_status("completed", steps)
    return 0
