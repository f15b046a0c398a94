"""`attach` as a callback of transformers' Trainer."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks

from mmqk.monitors.adapters.adapter import Adapter
from mmqk.monitors.attach import Watch, attach
from mmqk.monitors.third_party.inputs import Modality
from mmqk.monitors.third_party.sides import Sides


class NormCallback(TrainerCallback):
    """Measures the Trainer's model and logs to every integration in ``report_to``, such as W&B.

    ```python
    Trainer(model, args, train_dataset=ds, callbacks=[NormCallback(modality={"image": range(4, 8196)})])
    ```

    Args:
        modality: as in `mmqk.monitors.attach`.
        every_n_steps: as in `attach`.
        sequences: as in `attach`.
        out: as in `attach`.
        names: as in `attach`.
        adapter: as in `attach`.
        sides: as in `attach`.
    """

    def __init__(
        self,
        modality: Modality,
        every_n_steps: int = 100,
        sequences: int = 4,
        out: str | Path | None = None,
        names: tuple[str, ...] = ("text", "image"),
        adapter: Adapter | None = None,
        sides: Sides | None = None,
    ):
        self.options: dict[str, Any] = {
            "modality": modality, "every_n_steps": every_n_steps, "sequences": sequences, "out": out, "names": names,
            "adapter": adapter, "sides": sides,
        }  # fmt: skip
        self.watch: Watch | None = None
        self._reporters: list[TrainerCallback] = []
        self._values: dict[str, float] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Attach before the first call of the model, and so before its compilation."""
        trainer = _calling_trainer()
        if trainer is not None:
            model = trainer.model_wrapped  # FSDP's wrapper gathers the weights
            kinds = tuple(get_reporting_integration_callbacks(args.report_to))
            self._reporters = [c for c in trainer.callback_handler.callbacks if type(c) in kinds]
        self.watch = attach(model, log=self._keep, **self.options)
        self.watch.steps = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Probe if one is due, and pass its values to the reporters."""
        assert self.watch is not None
        self.watch.step(state.global_step)
        if self._values is not None:
            for reporter in self._reporters:
                reporter.on_log(args, state, control, logs=dict(self._values), model=model)
            self._values = None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the hook at the end of the run."""
        if self.watch is not None:
            self.watch.close()

    def _keep(self, values: dict[str, float], step: int) -> None:
        self._values = values


def _calling_trainer() -> Any:
    """The Trainer that called the callback, from the call stack, since it is no argument; None if not on the stack.

    `Trainer.log` would work too, but it also prints, and a probe has hundreds of numbers.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if hasattr(caller, "callback_handler") and hasattr(caller, "model_wrapped"):
            return caller
        frame = frame.f_back
    return None
