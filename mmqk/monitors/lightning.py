"""NormMonitor: `attach` in somebody else's LightningModule, as a callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:  # the same under its other name
    from pytorch_lightning import Callback  # type: ignore[assignment]

from mmqk.monitors.adapters.adapter import Adapter
from mmqk.monitors.attach import Watch, attach
from mmqk.monitors.third_party.inputs import Modality
from mmqk.monitors.third_party.sides import Sides
from mmqk.store.errors import UserError


class NormMonitor(Callback):
    """Watches a submodule of a LightningModule and logs to every logger of the Trainer.

    Args:
        model: name of the attribute that holds it, such as "net" or "net.decoder".
        modality: as in `attach`.
        every_n_steps: as in `attach`.
        sequences: as in `attach`.
        out: as in `attach`.
        names: as in `attach`.
        adapter: as in `attach`.
        sides: as in `attach`.
    """

    def __init__(
        self,
        model: str,
        modality: Modality,
        every_n_steps: int = 100,
        sequences: int = 4,
        out: str | Path | None = None,
        names: tuple[str, ...] = ("text", "image"),
        adapter: Adapter | None = None,
        sides: Sides | None = None,
    ):
        self.model = model
        self.options: dict[str, Any] = {
            "modality": modality, "every_n_steps": every_n_steps, "sequences": sequences, "out": out, "names": names,
            "adapter": adapter, "sides": sides,
        }  # fmt: skip
        self.watch: Watch | None = None
        self._step = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Before the sanity check: a module compiled by then would not run a hook that comes later."""
        found = pl_module
        for name in self.model.split("."):
            found = getattr(found, name, None)
        if not hasattr(found, "register_forward_pre_hook"):
            raise UserError(
                f"NormMonitor(model={self.model!r}): {type(pl_module).__name__} has no such module; name "
                "the attribute whose forward the training step calls"
            )

        def log(values: dict[str, float], step: int) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(values, step)

        self.watch = attach(found, log=log, **self.options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Where a run that resumes goes on from."""
        assert self.watch is not None
        self.watch.steps = self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """An optimizer step, or one of several batches that make one."""
        assert self.watch is not None
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self.watch.step(trainer.global_step)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """The hook goes with the end of the run."""
        if self.watch is not None:
            self.watch.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Likewise, and the folder says so."""
        if self.watch is not None:
            self.watch.close("interrupted" if isinstance(exception, KeyboardInterrupt) else "failed")
