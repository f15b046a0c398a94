"""Small run folders for tests of the page: sweeps over learning rate and size, and forks. The files are written
without mmqk's writers."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

from tests.lab.small_runs import small_run

STEPS, EVERY = 100, 10
START = {"text": 7.0, "image": 6.2}
WIDTHS = (32, 64, 128, 256)
RATES = (0.001, 0.003, 0.01, 0.03)
BASE: dict[str, Any] = {
    "model": {
        "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 0, "d_head": 0, "d_ff": 0, "mlp": "swiglu",
        "qk_norm": {"kind": "none"}, "residual_dropout": 0.0, "pre_norm": True, "post_norm": False,
    },
    "loss": {"weights": {}},
    "optim": {"lr": 0.01, "warmup_steps": 10},
    "data": {"batch_size": 8, "seq_len": 128, "mix": {"pair": 1.0}},
    "backend": "sdpa",
    "trainer": {"max_steps": STEPS, "precision": "32-true"},
}  # fmt: skip


def write(
    path: Path,
    *,
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    loss: float = 4.0,
    logit: float = 20.0,
    status: str = "completed",
    start: int = 0,
    end: int = STEPS,
    id: str = "",
    fork: dict[str, Any] | None = None,
    every: int = EVERY,
) -> Path:
    """Write one run. Its losses fall from `START` to ``loss`` (text) and ``loss + 1`` (image); logits rise to
    ``logit``."""
    identity = copy.deepcopy(BASE) | {"seed": seed}
    for name, value in (settings or {}).items():
        *parents, last = name.split(".")
        section = identity
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    small_run(path, series_of(range(start, end + 1), end, seed, loss, logit, status, every), status=status, seed=seed)
    details = {"config": identity, "versions": {"python": "3.11.7"}, "machine": {"cpus": 2}}
    record = {"id": id or path.parent.name[-10:], "code": "c0de", "identity": identity, "details": details}
    (path / "run.json").write_text(json.dumps(record))
    if fork:
        (path / "fork.json").write_text(json.dumps(fork))
    return path


def series_of(
    steps: range, end: int, seed: int, loss: float, logit: float, status: str, every: int
) -> dict[str, dict[int, float]]:
    """Return the losses of every step, and the statistics of every probe, by tag and step."""
    trained, probes = [s for s in steps if s], [s for s in steps if s % every == 0 or s == end]
    series: dict[str, dict[int, float]] = {}
    for extra, (m, first) in enumerate(START.items()):
        series[f"loss/{m}"] = {s: first + (loss + extra - first) * s / end + 0.01 * seed for s in trained}
        ends = {0: first} if steps[0] == 0 else {}
        series[f"val_loss/{m}"] = ends | ({end: loss + extra + 0.01 * seed} if status == "completed" else {})
        series[f"final_norm/{m}"] = {s: 8 + s / end * logit for s in probes}
        for layer in range(2):
            growth = {s: 2 ** (1 - s / end) * logit ** (s / end) for s in probes}
            scale = (1 + 0.02 * seed) * (1 - 0.3 * layer)
            series[f"attn_logit_absmax/{m}-{m}/layer{layer:02d}"] = {s: v * scale for s, v in growth.items()}
            series[f"attn_entropy/{m}/layer{layer:02d}"] = {s: 3.0 - s / end for s in probes}
            for norm in ("q_norm", "k_norm", "v_norm", "resid_norm"):
                series[f"{norm}/{m}/layer{layer:02d}"] = {s: 4.0 + s / end * math.log(logit) for s in probes}
    text, image = (series[f"loss/{m}"] for m in START)
    series["loss"] = {s: (text[s] + image[s]) / 2 for s in trained}
    return {tag: values for tag, values in series.items() if values}


def planted_logit(width: int, lr: float, qk: bool) -> float:
    """Return the largest logit at the end: the exponential of a quadratic in log width, times a power of the learning
    rate."""
    if qk:
        return 6.0 + 100 * lr
    x = math.log(width / 32)
    return math.exp(2.0 + 0.5 * x + 0.15 * x * x) * (lr / 0.003) ** 0.8


def write_sweep(folder: Path, *, seeds: tuple[int, ...] = (0, 1), widths: tuple[int, ...] = WIDTHS) -> Path:
    """Write a grid of two families over learning rate and width. Without QK-Norm, wide models diverge at the highest
    learning rate."""
    arms: dict[str, Any] = {
        "plain": {"label": "no QK-Norm", "set": {"model.qk_norm.kind": "none"}},
        "qk": {"label": "QK-Norm", "set": {"model.qk_norm.kind": "rms"}},
    }
    entries = []
    for family in arms:
        qk = family == "qk"
        for number, width in enumerate(widths):
            for lr in RATES:
                point = {"optim.lr": lr, "model.d_model": width}
                arm = f"{family}-lr{lr}-d_model{width}"
                id = f"{number:02d}{'a' if qk else 'b'}{round(lr * 1e4):07d}"
                for seed in seeds:
                    name = f"{arm}-{id}/seed{seed}"
                    entries.append(
                        {"arm": arm, "seed": seed, "folder": name, "id": id, "family": family, "point": point,
                         "role": "verdict", "fork": None}
                    )  # fmt: skip
                    dies = not qk and lr == max(RATES) and width >= 128
                    write(
                        folder / name,
                        seed=seed,
                        settings={**arms[family]["set"], **point},
                        loss=4.5 - 0.2 * number + abs(math.log10(lr / 0.01)) * (0.2 if qk else 0.5),
                        logit=planted_logit(width, lr, qk),
                        status="diverged" if dies else "completed",
                        end=60 if dies else STEPS,
                        id=id,
                    )
    claim = {
        "id": "S1",
        "statement": "QK-Norm lowers the sensitivity to the learning rate",
        "source": "Wortsman et al. 2309.14322, Fig. 1",
        "source_access": "V",
        "metric": "first_unstable_lr/text",
        "treatment": "qk",
        "control": "plain",
        "at": {"model.d_model": 64},
        "min_effect": 0.5,
        "direction": "greater",
        "status": "exploratory",
    }
    grid = {
        "name": "sweep",
        "title": "Learning rates",
        "seeds": list(seeds),
        "arms": arms,
        "axes": {"optim.lr": list(RATES), "model.d_model": list(widths)},
        "claims": [claim],
        "report": {"command": "python -m mmqk.ablate --config configs/ablations/sweep.yaml"},
    }
    record = {"name": "sweep", "grid": grid, "runs": entries, "threads": 1}
    (folder / "ablation.json").write_text(json.dumps(record))
    return folder


def write_forks(folder: Path) -> Path:
    """Write a folder without a grid: a parent, two forks of it, a fork of a fork, and a fork whose parent is
    elsewhere."""
    write(folder / "plain", seed=0, id="aaaaaaaaaa", logit=400.0)

    def fork(parent: str, id: str, step: int, changed: list[Any], **more: Any) -> dict[str, Any]:
        said = {"id": id, "folder": parent, "checkpoint": f"{parent}/checkpoints/x.ckpt", "step": step}
        changes = [dict(zip(("field", "from", "to"), change, strict=True)) for change in changed]
        return {"parent": said, "changed": changes, **more}

    late = [("model.qk_norm.kind", "none", "rms")]
    write(
        folder / "late",
        id="bbbbbbbbbb",
        settings={"model.qk_norm.kind": "rms"},
        start=40,
        logit=30.0,
        fork=fork(
            "runs/x/plain", "aaaaaaaaaa", 40, late, optimizer="carried over",
            added=[{"name": name, "how": "0"} for name in ("g1", "g2")],
            function={"logits_rms_relative": 0.013, "loss": {"text": [4.0, 4.1]}},
        ),
    )  # fmt: skip
    cold = [("optim.lr", 0.01, 0.003)]
    write(folder / "cold", id="cccccccccc", start=40, fork=fork("runs/x/plain", "aaaaaaaaaa", 40, cold))
    hot = [("optim.lr", 0.003, 0.1)]
    write(
        folder / "hot", id="dddddddddd", start=70, end=90, status="diverged",
        fork=fork("runs/x/cold", "cccccccccc", 70, hot),
    )  # fmt: skip
    write(folder / "lost", id="eeeeeeeeee", start=10, fork=fork("elsewhere/gone", "0123456789", 10, []))
    return folder
