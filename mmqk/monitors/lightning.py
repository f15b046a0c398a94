"""NormMonitor: `attach` as a Lightning callback, for any LightningModule."""

from __future__ import annotations

import math
from inspect import signature
from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:  # the package's former name
    from pytorch_lightning import Callback  # type: ignore[assignment]

from mmqk.monitors.attach import Watch, attach
from mmqk.monitors.modalities import Modality
from mmqk.store.errors import UserError


class NormMonitor(Callback):
    """Measures a LightningModule or a submodule of it, and logs to every logger of the Trainer.

    Args:
        model: path of the submodule in the LightningModule, such as "net" or "net.decoder"; "" if the training step
            calls the forward of the LightningModule itself.
        modality: as in `attach`, which by default reads it from the model's config.
        options: the other arguments of `attach` except ``log``. ``optimizer=True`` measures the Trainer's optimizers.
    """

    def __init__(self, model: str, modality: Modality | None = None, **options: Any):
        # Raises TypeError for a wrong option now, not during training.
        signature(attach).bind(None, modality=modality, log=None, **options)
        self.model = model
        self.options = {"modality": modality, **options}
        self.watch: Watch | None = None
        self._step = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach before the sanity check, since a compiled module ignores hooks that are added later."""
        module = pl_module
        for name in filter(None, self.model.split(".")):
            module = getattr(module, name, None)
        if not hasattr(module, "register_forward_pre_hook"):
            raise UserError(
                f"NormMonitor(model={self.model!r}): {type(pl_module).__name__} has no such module: name "
                "the attribute whose forward the training step calls"
            )

        def log(values: dict[str, float], step: int) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(values, step)

        optimizer = trainer.optimizers if self.options.get("optimizer") else None
        self.watch = attach(module, log=log, **{**self.options, "optimizer": optimizer})

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the step that a resumed run starts from, and the length of the run, which needs the data of the loop."""
        assert self.watch is not None
        planned = trainer.estimated_stepping_batches  # infinite without a set length
        if not self.options.get("max_steps") and 0 < planned < math.inf:
            self.watch.output.rules.max_steps = int(planned)
        self.watch.steps = self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count a step if the batch ended one; with gradient accumulation several batches make one step."""
        assert self.watch is not None
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self.watch.step(trainer.global_step)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Remove the hook at the end of the run, and write the status "completed"."""
        if self.watch is not None:
            self.watch.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remove the hook, and write the status "interrupted" or "failed"."""
        if self.watch is not None:
            self.watch.close("interrupted" if isinstance(exception, KeyboardInterrupt) else "failed")
