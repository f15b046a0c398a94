"""Which sequences of the data's order a run reads in a step, from its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmqk.data.order import sequence_numbers
from mmqk.store import UserError, read_json, read_run
from mmqk.store.checkpoints import checkpoints_in


@dataclass(frozen=True)
class Position:
    """The position of a run in its data.

    Attributes:
        batch_size: sequences per optimizer step.
        ahead: number that is added to ``(step - 1) * batch_size`` to get the first place of a step in the order.
        skip: numbers of the sequences that the run leaves out, ascending.
        first: the first step that the run trains; later than 1 for a fork.
        parent: folder or checkpoint of the parent of a fork.
    """

    batch_size: int
    ahead: int = 0
    skip: tuple[int, ...] = ()
    first: int = 1
    parent: str = ""

    @classmethod
    def of(cls, folder: Path) -> Position:
        """Return the position of a run. A fork has it in fork.json, or in its own checkpoints if it is older.

        Raises:
            UserError: the folder is no run, or a fork without both.
        """
        details = (read_run(folder) or {}).get("details") or {}
        if "config" not in details:
            raise UserError(f"{folder} is not the folder of a run of mmqk train: name one that has a run.json.")
        size, fork = details["config"]["data"]["batch_size"], details.get("fork")
        if fork is None:
            return cls(size)
        data = (read_json(folder / "fork.json") or {}).get("data")
        if data is None:
            from mmqk.checkpoint import load_checkpoint  # imports torch

            own = checkpoints_in(folder / "checkpoints")
            if not own:
                raise UserError(f"{folder} is a fork without fork.json and checkpoints: its position is unknown.")
            data = load_checkpoint(own[-1])["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]
        return cls(size, data["ahead"], tuple(data.get("skip", ())), fork["step"] + 1, fork["given"])

    def numbers(self, step: int) -> list[int]:
        """Return the numbers of the sequences of a step, by its number in metrics.jsonl (the first is 1).

        Raises:
            UserError: the run has no such step.
        """
        if step < self.first:
            advice = f"it is a fork, so name its parent {self.parent}" if self.parent else "name a later step"
            raise UserError(f"The run begins with step {self.first} and has no step {step}: {advice}.")
        places = np.arange(self.batch_size) + (step - 1) * self.batch_size + self.ahead
        numbers: list[int] = sequence_numbers(places, self.skip).tolist()
        return numbers
