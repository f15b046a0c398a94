"""Write reports/real_model/report.md from runs.json, which ``real_model.py`` wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd

OUT = Path("reports/real_model")
LAYERED = [("attn_logit_max", "text-text"), ("attn_logit_absmax", "text-text"), ("attn_entropy", "text"),
           ("q_norm", "text"), ("k_norm", "text"), ("resid_norm", "text"), ("resid_norm_max", "text")]  # fmt: skip
GROWING = ("attn_logit_absmax/", "q_norm/", "k_norm/", "resid_norm/", "attn_out_norm/", "mlp_out_norm/")


def table(rows: list[dict]) -> str:
    frame = pd.DataFrame(rows).map(lambda x: f"{x:.4g}" if isinstance(x, float) else x).fillna("")
    head = ["| " + " | ".join(map(str, row)) + " |" for row in [frame.columns, ["---"] * len(frame.columns)]]
    return "\n".join(head + ["| " + " | ".join(map(str, row)) + " |" for row in frame.values.tolist()])


def page(runs: dict) -> str:
    """Return the report as Markdown."""
    text, fits = runs["text, plain"], {k: v for k, v in runs.get("fits", {}).items() if isinstance(v, dict)}
    layers = [
        {"layer": layer}
        | {s: text["probe"][f"{s}/{m}/layer{layer:02d}"] for s, m in LAYERED}
        | {"pre-norm gain, RMS": text["gains"][f"blocks.{layer}.attn_pre_norm.weight"][0]}
        | {"largest": text["gains"][f"blocks.{layer}.attn_pre_norm.weight"][1]}
        for layer in range(30)
    ]
    rows = [{"gains": k, "logits differ by": v["logits"], "loss before": v["loss"]["text"][0],
             "loss after": v["loss"]["text"][1]} for k, v in fits.items()]  # fmt: skip
    trained = [{"model": name, **{k: runs[name].get(k) for k in ("before", "after", "steps", "trained")}}
               for name in ("text, plain", "text, QK-Norm") if name in runs and "trained" in runs[name]]  # fmt: skip
    arms, losses_, grown = [name for name in runs if "at" in runs[name] and len(runs[name]["at"]) > 1], [], []
    for name in arms:
        at = runs[name]["at"]
        first, last = (at[s] for s in (min(at, key=int), max(at, key=int)))
        kinds = [tag for tag in first if tag.startswith("val_loss")]
        moved = {t: f"{first[t]:.2f} to {last[t]:.2f}" for t in kinds}
        losses_.append({"arm": name, "steps": max(map(int, at))} | moved)
        for group in sorted({t.rpartition("/layer")[0] for t in first if t.startswith(GROWING)}):
            tags = [t for t in first if t.rpartition("/layer")[0] == group]
            factor = {t: last[t] / first[t] for t in tags}
            most = max(factor, key=factor.__getitem__)
            ends = f"{max(first[t] for t in tags):.3g} to {max(last[t] for t in tags):.3g}"
            grown.append({"arm": name, "statistic": group, "median factor": float(np.median([*factor.values()])),
                          "largest factor": factor[most], "in": most.rpartition("/")[2], "maximum": ends})  # fmt: skip
    minutes = sum(part.get("cpu_minutes", 0.0) for part in runs.values())
    return f"""# SmolLM2-135M, with other norms and with image tokens

Measured by `docs/experiments/real_model.py`, {minutes:.0f} minutes of one core. One seed: no verdicts.

## On text, by layer

Loss {text["before"]:.3f} nats per token.

{table(layers)}

## QK-Norm by surgery, held-out text

{table(rows)}

{table(trained)}

## Image tokens added: held-out losses

{table(losses_)}

## What grows: last step / first step, over layers

{table(grown)}
"""


if __name__ == "__main__":
    (OUT / "report.md").write_text(page(json.loads((OUT / "runs.json").read_text())))
