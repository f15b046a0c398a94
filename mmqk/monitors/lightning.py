"""NormMonitor: `attach` as a Lightning callback, for any LightningModule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:  # the package's former name
    from pytorch_lightning import Callback  # type: ignore[assignment]

from mmqk.monitors.adapters.adapter import Adapter
from mmqk.monitors.attach import Watch, attach
from mmqk.monitors.third_party.inputs import Modality
from mmqk.monitors.third_party.sides import Sides
from mmqk.store.errors import UserError


class NormMonitor(Callback):
    """Measures a submodule of a LightningModule and logs to every logger of the Trainer.

    Args:
        model: path of the submodule's attribute, such as "net" or "net.decoder"; the training step calls its forward.
            It is "model" for mmqk's `TrainingModule`.
        modality, every_n_steps, sequences, out, names, adapter, sides: as in `attach`.
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
        """Attach before the sanity check, since a compiled module ignores hooks that are added later."""
        module = pl_module
        for name in self.model.split("."):
            module = getattr(module, name, None)
        if not hasattr(module, "register_forward_pre_hook"):
            raise UserError(
                f"NormMonitor(model={self.model!r}): {type(pl_module).__name__} has no such module: name "
                "the attribute whose forward the training step calls"
            )

        def log(values: dict[str, float], step: int) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(values, step)

        self.watch = attach(module, log=log, **self.options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the step that a resumed run starts from."""
        assert self.watch is not None
        self.watch.steps = self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a step if the batch ended one; with gradient accumulation several batches make one step."""
        assert self.watch is not None
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self.watch.step(trainer.global_step)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Remove the hook at the end of the run."""
        if self.watch is not None:
            self.watch.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remove the hook, and write the status interrupted or failed."""
        if self.watch is not None:
            self.watch.close("interrupted" if isinstance(exception, KeyboardInterrupt) else "failed")
