"""Run folders for tests of the page: sweeps over learning rate and size, and forks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tests.lab.fake_runs import Planted, write_grid, write_run

WIDTHS = (32, 64, 128, 256)
RATES = (0.001, 0.003, 0.01, 0.03)


def planted_loss(number: int, lr: float, qk: bool) -> float:
    """Return the final text loss of the width with this number."""
    return 4.5 - 0.2 * number + abs(math.log10(lr / 0.01)) * (0.2 if qk else 0.5)


def write_sweep(folder: Path, *, seeds: tuple[int, ...] = (0, 1), widths: tuple[int, ...] = WIDTHS) -> Path:
    """Write a grid of two families over learning rate and width. Without QK-Norm, wide models diverge at the highest
    learning rate."""
    arms: dict[str, Any] = {
        "plain": {"label": "no QK-Norm", "set": {"model.qk_norm.kind": "none"}},
        "qk": {"label": "QK-Norm", "set": {"model.qk_norm.kind": "rms"}},
    }
    runs = []
    for family, arm in arms.items():
        qk = family == "qk"
        for number, width in enumerate(widths):
            for lr in RATES:
                point = {"optim.lr": lr, "model.d_model": width}
                dies = not qk and lr == max(RATES) and width >= 128
                loss = planted_loss(number, lr, qk)
                ends = {"text": loss, "image": loss + 1}
                planted = Planted(20.0, ends, diverges=120 if dies else None, validated=not dies)
                entry = {"arm": f"{family}-lr{lr}-d_model{width}", "family": family, "point": point, "role": "verdict"}
                runs += [({**entry, "seed": seed}, planted, {**arm["set"], **point}) for seed in seeds]
    claim = {
        "id": "S1",
        "statement": "QK-Norm lowers the sensitivity to the learning rate",
        "metric": "first_unstable_lr/text",
        "treatment": "qk",
        "control": "plain",
        "at": {"model.d_model": 64},
        "min_effect": 0.5,
        "direction": "greater",
        "status": "exploratory",
    }
    axes = {"optim.lr": list(RATES), "model.d_model": list(widths)}
    return write_grid(folder, {"seeds": list(seeds), "arms": arms, "axes": axes, "claims": [claim]}, runs)


def write_forks(folder: Path) -> Path:
    """Write a folder without a grid: a parent, two forks of it, a fork of a fork, and a fork whose parent is
    elsewhere."""

    def fork(parent: str, id: str, step: int, changed: list[Any], **more: Any) -> dict[str, Any]:
        said = {"id": id, "folder": parent, "checkpoint": f"{parent}/checkpoints/x.ckpt", "step": step}
        changes = [dict(zip(("field", "from", "to"), change, strict=True)) for change in changed]
        return {"parent": said, "changed": changes, **more}

    write_run(folder / "plain", Planted(400.0), id="aaaaaaaaaa")
    late = fork(
        "runs/x/plain", "aaaaaaaaaa", 80, [("model.qk_norm.kind", "none", "rms")], optimizer="carried over",
        added=[{"name": name, "how": "0"} for name in ("g1", "g2")],
        function={"logits_rms_relative": 0.013, "loss": {"text": [4.0, 4.1]}},
    )  # fmt: skip
    write_run(folder / "late", Planted(30.0), 0, {"model.qk_norm.kind": "rms"}, "bbbbbbbbbb", fork=late)
    cold = fork("runs/x/plain", "aaaaaaaaaa", 80, [("optim.lr", 0.01, 0.003)])
    write_run(folder / "cold", Planted(20.0), id="cccccccccc", fork=cold)
    hot = fork("runs/x/cold", "cccccccccc", 140, [("optim.lr", 0.003, 0.1)])
    write_run(folder / "hot", Planted(20.0, diverges=180, validated=False), id="dddddddddd", fork=hot)
    lost = fork("elsewhere/gone", "0123456789", 20, [])
    write_run(folder / "lost", Planted(20.0), id="eeeeeeeeee", fork=lost)
    return folder
