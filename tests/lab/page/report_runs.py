"""Small run folders for tests of the page: sweeps over learning rate and size, and forks. The files are written
without mmqk's writers."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

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
    wiggle: float = 0.0,
) -> Path:
    """Write one run. Its losses fall from `START` to ``loss`` (text) and ``loss + 1`` (image); logits rise to
    ``logit``."""
    path.mkdir(parents=True)
    identity = copy.deepcopy(BASE) | {"seed": seed}
    for name, value in (settings or {}).items():
        *parents, last = name.split(".")
        section = identity
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    details = {"config": identity, "versions": {"python": "3.11.7"}, "machine": {"cpus": 2}}
    record = {"id": id or path.parent.name[-10:], "code": "c0de", "identity": identity, "details": details}
    (path / "run.json").write_text(json.dumps(record))
    reason = "text loss was high for 50 steps" if status == "diverged" else ""
    ended = {"status": status, "step": end, "reason": reason, "seconds": 12.0 + seed}
    (path / "status.json").write_text(json.dumps(ended))
    if fork:
        (path / "fork.json").write_text(json.dumps(fork))
    with open(path / "metrics.jsonl", "w") as file:
        for step in range(start, end + 1):
            file.write(json.dumps(_line(step, end, seed, loss, logit, status, every, wiggle)) + "\n")
    return path


def _line(
    step: int, end: int, seed: int, loss: float, logit: float, status: str, every: int, wiggle: float
) -> dict[str, float]:
    late = step / end
    line: dict[str, float] = {"step": step}
    for extra, (m, first) in enumerate(START.items()):
        if step:
            line[f"loss/{m}"] = first + (loss + extra - first) * late + 0.01 * seed
        if step == 0 or (step == end and status == "completed"):
            line[f"val_loss/{m}"] = first if step == 0 else loss + extra + 0.01 * seed
    if step:
        line["loss"] = (line["loss/text"] + line["loss/image"]) / 2
    if step % every == 0 or step == end:
        for layer in range(2):
            for m in START:
                value = 2 ** (1 - late) * logit**late * (1 + 0.02 * seed) * (1 - 0.3 * layer)
                value *= 1 + wiggle * math.sin(step)
                line[f"attn_logit_absmax/{m}-{m}/layer{layer:02d}"] = value
                line[f"attn_entropy/{m}/layer{layer:02d}"] = 3.0 - late
                for norm in ("q_norm", "k_norm", "v_norm", "resid_norm"):
                    line[f"{norm}/{m}/layer{layer:02d}"] = 4.0 + late * math.log(logit)
        for m in START:
            line[f"final_norm/{m}"] = 8 + late * logit
    return line


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
