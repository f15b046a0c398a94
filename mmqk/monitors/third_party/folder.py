"""The run folder of a watch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mmqk.store.errors import UserError
from mmqk.store.files import write_json
from mmqk.store.folder import STATUS_NAME
from mmqk.store.metrics import MetricsWriter, last_metrics


class Folder:
    """``metrics.jsonl`` and ``status.json``, from the first step on; a run that resumes leaves out what came later.

    Args:
        path: of the folder, made if it is not there.
        started: step that the run goes on from.

    Raises:
        UserError: later steps of another run are in it, or it cannot be written.
    """

    def __init__(self, path: Path, started: int):
        file = path / "metrics.jsonl"
        last = last_metrics(file).get("step")
        if last is not None and not started:
            raise UserError(
                f"{file} holds a run up to step {last}: give another folder, or set watch.steps to the step that "
                "this one resumes from"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._writer = MetricsWriter(file)
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error}): give another folder") from error
        self.path = path
        self._writer.truncate_after(started)
        self._status("running", started)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One line, and how far the run is."""
        self._writer.write(step, values)
        self._writer.flush()
        self._status("running", step)

    def close(self, step: int, status: str) -> None:
        """The run ended here."""
        self._writer.close()
        self._status(status, step)

    def _status(self, status: str, step: int) -> None:
        write_json(self.path / STATUS_NAME, {"status": status, "step": step})
