"""Writes the run folder of `attach`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mmqk.store.errors import UserError
from mmqk.store.files import write_json
from mmqk.store.folder import STATUS_NAME
from mmqk.store.metrics import MetricsWriter, last_metrics


class WatchFolder:
    """Writes ``metrics.jsonl`` and ``status.json``; a resumed run removes the lines after the step it resumes from.

    Args:
        path: the folder, created if missing.
        started: step that the run resumes from; 0 for a new run.

    Raises:
        UserError: the folder has steps of another run, or cannot be written.
    """

    def __init__(self, path: Path, started: int):
        file = path / "metrics.jsonl"
        last = last_metrics(file).get("step")
        if last is not None and not started:
            raise UserError(
                f"{file} has a run up to step {last}: give another folder, or set watch.steps to the step that this "
                "run resumes from"
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
        """Write one line of metrics, and write the step to ``status.json``."""
        self._writer.write(step, values)
        self._writer.flush()
        self._status("running", step)

    def close(self, step: int, status: str) -> None:
        """Close the metrics file and write the final status."""
        self._writer.close()
        self._status(status, step)

    def _status(self, status: str, step: int) -> None:
        write_json(self.path / STATUS_NAME, {"status": status, "step": step})
