"""`attach` as a callback of transformers' Trainer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks

from mmqk.monitors.attach import Watch, attach
from mmqk.monitors.modalities import Modality


class NormCallback(TrainerCallback):
    """Measures the Trainer's model; logs to ``trainer.state.log_history`` and to each integration in ``report_to``.

    The values have the tags of mmqk. They are not printed, because a probe has hundreds of them.

    ```python
    Trainer(model, args, train_dataset=ds, callbacks=[NormCallback(modality={"image": range(4, 8196)})])
    ```

    Args:
        modality: as in `mmqk.monitors.attach`, which by default reads it from the model's config.
        options: the other arguments of `attach` except ``log``. ``optimizer=True`` measures the Trainer's optimizer.
    """

    def __init__(self, modality: Modality | None = None, **options: Any):
        # Raises TypeError for a wrong option now, not during training.
        inspect.signature(attach).bind(None, modality=modality, log=None, **options)
        self.options = {"modality": modality, **options}
        self.watch: Watch | None = None
        self._reporters: list[TrainerCallback] = []
        self._values: dict[str, float] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Attach before the first call of the model, and therefore before the model is compiled."""
        trainer = _calling_trainer()
        if trainer is not None:
            model = trainer.model_wrapped  # FSDP's wrapper gathers the weights
            kinds = tuple(get_reporting_integration_callbacks(args.report_to))
            self._reporters = [c for c in trainer.callback_handler.callbacks if type(c) in kinds]
        optimizer = kwargs["optimizer"] if self.options.get("optimizer") else None
        max_steps = self.options.get("max_steps") or state.max_steps
        options = {**self.options, "max_steps": max_steps, "optimizer": optimizer}
        self.watch = attach(model, log=self._store, **options)
        self.watch.steps = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Probe if a probe is due, and log its values as `Trainer.log` does, but without printing them."""
        assert self.watch is not None
        self.watch.step(state.global_step)
        self._report(args, state, control, model, self._reporters)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the hook at the end of the run, log the last losses, and write the status "completed"."""
        if self.watch is not None:
            self.watch.close()
            self._report(args, state, control, None, ())  # the integrations have ended

    def _report(self, args: Any, state: Any, control: Any, model: Any, reporters: Iterable[TrainerCallback]) -> None:
        if self._values is not None:
            epoch = {} if state.epoch is None else {"epoch": state.epoch}
            state.log_history.append({**self._values, **epoch, "step": state.global_step})
            for reporter in reporters:
                reporter.on_log(args, state, control, logs=dict(self._values), model=model)
            self._values = None

    def _store(self, values: dict[str, float], step: int) -> None:
        self._values = values


def _calling_trainer() -> Any:
    """Return the Trainer that called the callback, or None if there is none.

    This function searches the call stack, because a callback does not get the Trainer as an argument.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if hasattr(caller, "callback_handler") and hasattr(caller, "model_wrapped"):
            return caller
        frame = frame.f_back
    return None
