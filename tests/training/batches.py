"""Record the sequences that a run really trains on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mmqk.train import main
from mmqk.training.module import TrainingModule


def recorded(patch: pytest.MonkeyPatch, args: list[str], out: Path) -> dict[int, list[list[int]]]:
    """Train a run; return for each step that it trained, by its number in metrics.jsonl, the ids of each sequence
    without the padding."""
    batches: dict[int, list[list[int]]] = {}
    step_of_run = TrainingModule.training_step

    def record(module, batch, index):
        ids_BT, valid_BT = batch.ids_BT.numpy(), batch.valid_BT.numpy()
        rows = [np.asarray(ids[valid]).tolist() for ids, valid in zip(ids_BT, valid_BT, strict=True)]
        batches.setdefault(module.trainer.global_step + 1, []).extend(rows)
        return step_of_run(module, batch, index)

    with patch.context() as inside:
        inside.setattr(TrainingModule, "training_step", record)
        assert main([*args, "--quiet", f"--out={out}"]) == 0
    return batches
