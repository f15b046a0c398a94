"""Write run folders like those of the demo, with planted numbers, without using mmqk's writers.

``python tests/lab/fake_runs.py FOLDER`` writes an example.
"""

from __future__ import annotations

import copy
import json
import math
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEPS, EVERY, LAYERS = 200, 20, 4
START = {"text": 6.9, "image": 6.3}
UNIGRAM = {"text": 5.6, "image": 5.5}


@dataclass(frozen=True)
class Planted:
    """The planted results of an arm's runs.

    ``logit`` is the largest attention logit at the end; its logarithm has the standard deviation ``spread`` over
    seeds. ``loss`` and ``excess`` are the final loss and the final excess loss by modality. ``diverges`` is the step
    of the divergence. From step ``nan_from`` on, probes are NaN.
    """

    logit: float
    loss: dict[str, float] = field(default_factory=lambda: {"text": 3.4, "image": 4.6})
    spread: float = 0.12
    diverges: int | None = None
    nan_from: int | None = None
    status: str = "completed"
    validated: bool = True
    bound: bool = False
    excess: dict[str, float] = field(default_factory=dict)


DEMO = {
    "mixed": Planted(60.0),
    "mixed-qk": Planted(8.5, {"text": 3.4, "image": 4.5}, bound=True),
    "image-off": Planted(55.0, {"text": 3.3, "image": 6.35}),
    "high-pre": Planted(42000.0, {"text": 5.9, "image": 6.2}, diverges=140, validated=False),
    "high-pre-qk": Planted(18.0, {"text": 3.9, "image": 5.0}, bound=True),
    "high-post": Planted(160000.0, {"text": 4.4, "image": 5.4}),
    "high-post-qk": Planted(16.0, {"text": 3.6, "image": 4.8}, bound=True),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "mixed": {"model.qk_norm.kind": "none"},
    "mixed-qk": {"model.qk_norm.kind": "rms"},
    "image-off": {"model.qk_norm.kind": "none", "loss.weights.image": 0.0},
    "high-pre": {"optim.lr": 0.1, "model.qk_norm.kind": "none"},
    "high-pre-qk": {"optim.lr": 0.1, "model.qk_norm.kind": "rms"},
    "high-post": {"optim.lr": 0.1, "model.qk_norm.kind": "none", "model.pre_norm": False, "model.post_norm": True},
    "high-post-qk": {"optim.lr": 0.1, "model.qk_norm.kind": "rms", "model.pre_norm": False, "model.post_norm": True},
}
LABELS = {"mixed": "mixed, no QK-Norm", "mixed-qk": "mixed, QK-Norm", "image-off": "image loss off, no QK-Norm"}
BASE: dict[str, Any] = {
    "model": {
        "qk_norm": {"kind": "none"}, "pre_norm": True, "post_norm": False, "d_model": 64, "n_layers": LAYERS,
        "n_heads": 4, "n_kv_heads": 0, "d_head": 0, "d_ff": 0, "mlp": "swiglu",
    },
    "loss": {"weights": {}},
    "optim": {"lr": 0.01},
    "data": {"batch_size": 8, "seq_len": 128},
    "backend": "sdpa",
    "trainer": {"max_steps": STEPS, "precision": "32-true"},
}  # fmt: skip
C2 = {
    "id": "C2",
    "statement": "without QK-Norm attention logits explode with the learning rate",
    "source": "Wortsman et al. 2309.14322, Fig. 2",
    "source_access": "V",
    "reference_value": "172.8 against 11.2 at learning rate 0.01",
    "metric": "largest_attention_logit",
    "treatment": "mixed",
    "control": "mixed-qk",
    "min_effect": 0.69,
    "direction": "greater",
    "regime": "both modalities learned",
    "positive_control": "P1",
    "status": "confirmatory",
    "would_contradict": "ratio below 2",
}
P1 = {
    "id": "P1",
    "statement": "at a learning rate that is too high, logits without QK-Norm are large",
    "metric": "largest_attention_logit",
    "arms": ["high-pre"],
    "at_least": 100,
    "status": "control",
}
C10 = {
    "id": "C10",
    "statement": "image generation is what destabilizes",
    "metric": "largest_attention_logit",
    "treatment": "mixed",
    "control": "image-off",
    "min_effect": 0.45,
    "direction": "greater",
    "regime": "both modalities learned",
    "positive_control": "C2",
    "status": "confirmatory",
}
C13 = {
    "id": "C13",
    "statement": "QK-Norm is essential and not sufficient",
    "status": "shown",
    "arms": ["high-pre", "high-pre-qk", "high-post", "high-post-qk"],
}


def grid(planted: dict[str, Planted]) -> dict[str, Any]:
    """Return the grid of these arms as ablation.json stores it."""
    shown = [arm for arm in planted if arm.startswith("high")]
    arms = {
        arm: {
            "label": LABELS.get(arm, arm),
            "block": "shown" if arm in shown else "decided",
            "set": SETTINGS.get(arm, {}),
        }
        for arm in planted
    }
    for arm in shown:
        arms[arm]["seeds"] = [0]
    return {
        "name": "demo",
        "title": "Norm competition in minutes",
        "seeds": [0, 1, 2],
        "arms": arms,
        "claims": copy.deepcopy([C2, P1, C10, C13]),
        "report": {
            "hero": ["mixed", "mixed-qk", "image-off"],
            "command": "make demo",
            "cannot_tell": ["Anything about size: these are toy models on icon art.", "What a <7B> run would do."],
        },
    }


def write_demo(
    folder: Path,
    planted: dict[str, Planted] | None = None,
    *,
    seeds: tuple[int, ...] = (0, 1, 2),
    leave_out: tuple[str, ...] = (),
    unigram: bool = True,
    change: Any = None,
) -> Path:
    """Write a whole ablation under ``folder``; the runs of the arms in ``leave_out`` are missing.

    ``change(grid)`` may alter the grid before it is written.
    """
    planted = DEMO | (planted or {})
    raw = grid(planted)
    if change is not None:
        change(raw)
    runs = []
    for number, (arm, numbers) in enumerate(planted.items()):
        id = f"{number:010x}"
        for seed in (0,) if arm.startswith("high") else seeds:
            name = f"{arm}-{id}/seed{seed}"
            runs.append({"arm": arm, "seed": seed, "folder": name, "id": id})
            if arm not in leave_out:
                write_run(folder / name, numbers, seed, SETTINGS.get(arm), id, unigram)
    folder.mkdir(parents=True, exist_ok=True)
    record = {"name": "demo", "grid": raw, "runs": runs, "threads": 1}
    (folder / "ablation.json").write_text(json.dumps(record))
    return folder


def write_grid(folder: Path, grid: dict[str, Any], runs: list[tuple[dict[str, Any], Planted, dict[str, Any]]]) -> Path:
    """Write an ablation with any grid. ``runs`` are tuples (entry without its folder, planted results, settings)."""
    entries: list[dict[str, Any]] = []
    for entry, planted, settings in runs:
        name = f"{entry['arm']}-{len(entries):010x}/seed{entry['seed']}"
        entries.append({**entry, "folder": name})
        write_run(folder / name, planted, entry["seed"], settings)
    folder.mkdir(parents=True, exist_ok=True)
    record = {"name": "made", "grid": {"name": "made", **grid}, "runs": entries, "threads": 1}
    (folder / "ablation.json").write_text(json.dumps(record))
    return folder


def write_run(
    path: Path,
    planted: Planted,
    seed: int = 0,
    settings: dict | None = None,
    id: str = "0" * 10,
    unigram: bool = True,
    fork: dict[str, Any] | None = None,
) -> Path:
    """Write one run folder. A fork starts at the step of its parent that the record ``fork`` names."""
    path.mkdir(parents=True)
    identity = copy.deepcopy(BASE) | {"seed": seed}
    for name, value in (settings or {}).items():
        *parents, last = name.split(".")
        section = identity
        for parent in parents:
            section = section[parent]
        section[last] = value
    details = {
        "config": identity,
        "command": ["python", "-m", "mmqk.train", "--config", "configs/demo.yaml", f"--seed={seed}"],
        "versions": {"python": "3.11.7", "torch": "2.15.0"},
        "machine": {"system": "Linux", "processor": "x86_64", "cpus": 2},
    }
    record = {"id": id, "code": "c0de", "identity": identity, "details": details}
    (path / "run.json").write_text(json.dumps(record))
    data = {
        "text": {"share": 0.5, "used": 700, "block": 1029, "unigram": 5.81, "compressed": 4.4, "model": 4.2},
        "image": {"share": 0.5, "used": 512, "block": 512, "unigram": 6.19, "model": 5.13, "repeated": 0.049},
    }
    (path / "data.json").write_text(json.dumps(data))
    if fork is not None:
        (path / "fork.json").write_text(json.dumps(fork))
    end = planted.diverges or STEPS
    status = "diverged" if planted.diverges else planted.status
    reason = "image loss 7.41 was more than 0.1 nat above its initial 6.30 for 50 steps" if planted.diverges else ""
    (path / "status.json").write_text(
        json.dumps({"status": status, "step": end, "reason": reason, "seconds": 31.5 + seed})
    )
    with open(path / "metrics.jsonl", "w") as file:
        for line in lines(planted, seed, end, unigram, fork["parent"]["step"] if fork else 0):
            cells = {k: v if math.isfinite(v) else str(v) for k, v in line.items()}
            file.write(json.dumps(cells) + "\n")
    return path


def lines(planted: Planted, seed: int, end: int, unigram: bool, start: int):
    """Yield the lines of a run's metrics, one per step."""
    rng = random.Random(f"{seed} {planted.logit} {planted.loss}")
    # The standard deviation of log(final) over seeds 0 to 2 is exactly ``spread``, so that tests can compare with it.
    final = planted.logit * math.exp(planted.spread * ((seed % 3) - 1))
    for step in range(start, end + 1):
        line: dict[str, float] = {"step": step}
        if step == 0:
            line |= {f"val_loss/{m}": nats for m, nats in START.items()}
        if step == 0 and unigram:
            line |= {f"val_unigram/{m}": nats for m, nats in UNIGRAM.items()}
        if step:
            for m, start in START.items():
                line[f"loss/{m}"] = planted.loss[m] + (start - planted.loss[m]) * math.exp(-5 * step / end)
                line[f"loss/{m}"] += rng.gauss(0, 0.05)
            line["loss"] = (line["loss/text"] + line["loss/image"]) / 2
        if step % EVERY == 0 or step == end:
            line |= probe(planted, final, step, end)
        if step == end and planted.validated:
            line |= {f"val_loss/{m}": loss + 0.02 * seed for m, loss in planted.loss.items()}
            line |= {f"val_excess/{m}": nats for m, nats in planted.excess.items()}
        yield line


def probe(planted: Planted, final: float, step: int, end: int) -> dict[str, float]:
    """Return the statistics of one probe. In the last three probes the largest logit is exactly ``final``, in layer
    1."""
    late = min(1.0, step / (end - 2 * EVERY))
    line: dict[str, float] = {}
    for layer in range(LAYERS):
        if planted.bound:
            line[f"attn_logit_bound/layer{layer:02d}"] = max(4 * 1.3**2, final * 1.15)
        for m in START:
            for key in START:
                share = (1.0 if layer == 1 else 0.6) * (1.0 if m == key == "text" else 0.8)
                line[f"attn_logit_absmax/{m}-{key}/layer{layer:02d}"] = share * 3.0 ** (1 - late) * final**late
            line[f"attn_entropy/{m}/layer{layer:02d}"] = 3.2 - late * 0.2 * math.log(final) + 0.1 * layer
            for statistic, rate in (("q_norm", 0.5), ("k_norm", 0.45), ("v_norm", 0.1), ("resid_norm", 0.2)):
                line[f"{statistic}/{m}/layer{layer:02d}"] = 4.0 * (final / 3) ** (rate * late) + layer
    for m in START:
        line[f"final_norm/{m}"] = 8 * (1 + late * math.log(final))
        line[f"final_rms/{m}"] = line[f"final_norm/{m}"] / 8
    if planted.nan_from is not None and step >= planted.nan_from:
        line = {name: math.nan for name in line}
    return line


if __name__ == "__main__":
    print(write_demo(Path(sys.argv[1])))
