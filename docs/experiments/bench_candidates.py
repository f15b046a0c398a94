"""Two statistics that the packs of the bench do not have: the rank of the update of W_q^T W_k, and the sharpness.

    python docs/experiments/bench_candidates.py                       # runs/candidates.yaml: the bench, seeds 1 and 2
    mmqk ablate --config runs/candidates.yaml --out runs/candidates --jobs 2
    R="--rule docs.experiments.bench_candidates:update_rank --rule docs.experiments.bench_candidates:sharpness"
    mmqk bench runs/candidates $R --json reports/bench/candidates_develop.json
    mmqk bench runs/candidates $R --side judge --thresholds reports/bench/candidates_develop.json \
        --json reports/bench/candidates_judge.json

Both rules were written before any run with their statistics: the second has no choice, and the first is that of the
stable rank in `mmqk.bench.rules`.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import yaml

from mmqk.bench.rules import columns, of_first

BENCH = Path("configs/failures/bench.yaml")


def update_rank(metrics: pd.DataFrame) -> pd.Series:
    """Fall of the rank of the update of W_q^T W_k in a layer since the warm-up, in logarithms (arXiv 2606.28116)."""
    return of_first(1 / columns(metrics, "qk_update_rank"))


def sharpness(metrics: pd.DataFrame) -> pd.Series:
    """Curvature of the loss along Adam's step, times the learning rate (arXiv 2506.04805)."""
    return columns(metrics, "sharpness").max(axis=1)


def main() -> None:
    grid = yaml.safe_load(BENCH.read_text(encoding="utf-8"))
    grid["base"] = [str(Path("..", "configs", "failures", base)) for base in grid["base"]]
    grid["seeds"] = [1, 2]
    for arm in grid["arms"].values():
        arm["set"] = {**arm.get("set", {}), "monitor.sharpness": True}
    Path("runs/candidates.yaml").write_text(yaml.safe_dump(grid, sort_keys=False, allow_unicode=True), encoding="utf-8")


if __name__ == "__main__":
    main()
