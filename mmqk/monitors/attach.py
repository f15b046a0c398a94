"""`attach` measures a third-party model while it trains."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmqk.distributed import first_of_ranks, rank, summed, world_size
from mmqk.monitors.adapters import Adapter, adapter_for, unwrapped
from mmqk.monitors.collect import Statistics
from mmqk.monitors.foreign.inputs import Inputs, LastCall
from mmqk.monitors.foreign.layers import Layers
from mmqk.monitors.foreign.measurement import agreed
from mmqk.monitors.foreign.output import Log, Output, missing_series, summary_parts, warn_of_absent
from mmqk.monitors.foreign.probe import Prober
from mmqk.monitors.foreign.steps import Losses, Optimizers, Updates
from mmqk.monitors.modalities import Modality, Sides, check_sides, modalities_of
from mmqk.store import Alarm, AlarmRules
from mmqk.store.errors import UserError
from mmqk.store.formatting import some

# The first probe runs at this step at the latest: early enough to report a user error soon, late enough to time the
# steps before it.
FIRST_PROBE = 10


def attach(
    model: nn.Module,
    *,
    modality: Modality | None = None,
    every_n_steps: int = 100,
    sequences: int = 4,
    out: str | Path | None = None,
    log: Log | None = None,
    names: Sequence[str] = ("text", "image"),
    adapter: Adapter | None = None,
    sides: Sides | None = None,
    matrices: bool = False,
    optimizer: Optimizers | None = None,
    on_alarm: Callable[[Alarm], Any] | None = None,
    warmup_steps: int = 0,
    max_steps: int = 0,
    strict: bool = False,
) -> Watch:
    """Measure attention logits, entropy and norms by layer and modality while ``model`` trains.

    Call ``watch.step()`` after each optimizer step. Every ``every_n_steps`` steps a probe runs the model once more on
    the first sequences of the last batch: eagerly, in evaluation mode, without gradients, and outside autocast if all
    weights have fp32 or the training has no autocast. Probes leave the weights of the run unchanged, bit for bit.

    Args:
        model: the object that the training loop calls, with its torch.compile, FSDP or DDP wrapper if it has one.
        modality: the id range or ranges of each modality except text, ``{"image": range(4, 8196)}``, or ``{}`` if all
            ids are text; or a function that gets the model's inputs by name and returns (B, T), the modality number
            of each token. By default the ids of image, video and audio tokens that the model's config names; text
            only if it names none.
        every_n_steps: number of steps between probes; the first probe runs after at most 10 steps. 0 disables probes.
        sequences: number of sequences in a probe, on each rank.
        out: folder for ``metrics.jsonl`` and ``alarms.jsonl``, which mmqk's tools read.
        log: called as ``log({tag: number}, step=int)``, for instance ``wandb.log``.
        names: if ``modality`` is a function, the names of modalities 0, 1, …; ignored if ``modality`` has ranges.
        adapter: further tensors to measure; None uses mmqk's adapter for the model's transformers or timm layers.
        sides: further token sequences, by their name in tags. A value is the name of a model input,
            ``{"patch": "pixel_values"}``, or the name and the modality of the input,
            ``{"decoder": ("decoder_input_ids", {"image": range(4, 8196)})}``. Cross-attention between declared sides
            is measured as ``cross_...``.
        matrices: also measure the norm, spectral norm and stable rank of each matrix of the layers with attention.
            This costs one singular value decomposition per matrix and is not supported with FSDP.
        optimizer: also measure gradients, updates and gradient clipping at the step of each probe; a list if the
            model has several optimizers.
        on_alarm: called with each alarm (docs/alarms.md) on the first rank; the first of each kind is also printed.
        warmup_steps: warm-up steps of the learning rate, for the alarms.
        max_steps: steps of the run, for the alarms; 0 if unknown.
        strict: raise the error of a probe that fails; by default the probe is skipped, and a line gives the reason.

    Raises:
        UserError: no module, an invalid range or name, or a count below its minimum.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"model is {model!r}: pass the nn.Module that the training loop calls")
    if every_n_steps < 0:
        raise UserError(f"every_n_steps is {every_n_steps}: give a number of steps, or 0 for no probes")
    if sequences < 1:
        raise UserError(f"sequences is {sequences}: a probe needs at least 1")
    modalities = modalities_of(model, modality, names)
    checked_sides = check_sides(sides or {}, modalities.names)
    adapter = adapter or adapter_for(unwrapped(model))
    prober = Prober(model, modalities, sequences, adapter, checked_sides, matrices)
    updates = None if optimizer is None else Updates(model, optimizer)
    rules = AlarmRules(warmup_steps, max_steps)
    output = Output(None if out is None else Path(out), log, rules, on_alarm)
    return Watch(model, prober, every_n_steps, output, Losses(modalities), updates, strict)


@dataclass
class Watch:
    """The handle that `attach` returns.

    Attributes:
        prober: runs the probes, and has the results of the last one.
        output: gets the numbers.
        steps: optimizer steps so far. Set it before the first step of a resumed run.
    """

    model: nn.Module
    prober: Prober
    every_n_steps: int
    output: Output
    losses: Losses
    updates: Updates | None
    strict: bool
    steps: int = 0
    _last_call: LastCall = field(default_factory=LastCall)
    _started: int | None = None  # value of ``steps`` before the first step
    _step_times: list[float] = field(default_factory=list)  # of the steps before the first probe
    _tried: bool = False  # a probe was due and had a batch
    _summarized: bool = False  # the line after the first probe was printed
    _overdue: bool = False  # a probe was due, but the batch was empty
    _failures: set[str] = field(default_factory=set)  # reasons that were printed
    _bad: bool = False  # the last numbers were not finite
    _closed: bool = False

    def __post_init__(self) -> None:
        self._last_call.copying = self.every_n_steps > 0
        if self.updates is not None:
            self.updates.due = self._due(0, 1)
        self._hook = self.model.register_forward_pre_hook(self._last_call, with_kwargs=True)
        self._last_call.wrap(self.model)

    @property
    def layers(self) -> Layers | None:
        """Layers with and without measured attention in the last probe; None before the first probe."""
        return self.prober.layers

    def step(self, number: int | None = None, *, loss: Tensor | float | None = None) -> None:
        """Count a step, and probe if a probe is due. Call this after each optimizer step, on every rank.

        Args:
            number: the trainer's step number; by default, the number of calls of this method.
            loss: the loss of the step; with several ranks their mean is stored.

        Raises:
            UserError: ``out`` contains steps of another run. With ``strict``, also: a probe is due but the model was
                not called.
            RuntimeError: with ``strict`` or FSDP on several ranks, the forward pass of the probe failed.
        """
        if self._closed:
            return
        self._last_call.wrap(self.model)  # the model may have been compiled since the last step
        if self._started is None:
            if self.every_n_steps and rank() == 0:
                self.output.start(self.steps)  # as the caller has set it; 0 for a new run
            self.steps = self._started = self.steps if number is None else number - 1
        previous, self.steps = self.steps, self.steps + 1 if number is None else number
        if not self._tried:
            self._step_times.append(time.perf_counter())
        is_due = self._due(previous, self.steps)
        self.losses.end_step(self.steps, loss, self.prober.device)
        is_copy, call = self._last_call.is_copy, self._last_call.take(self.model)
        values: dict[str, float] = {}
        with self._going_on("numbers of the update"):
            values = self.updates.values() if self.updates is not None else {}
        values = values if is_due else {}
        with self._going_on("probe"):
            values |= self._values(call, is_copy) if is_due else {}
        if is_due or self.losses.is_full:
            self._write(values, call)
        self._last_call.copying = self._due(self.steps, 2 * self.steps - previous)
        if self.updates is not None:
            self.updates.due = self._last_call.copying

    def loss(self, logits_or_losses: Tensor, targets_BT: Tensor) -> None:
        """Add the losses of a micro-batch, for ``loss/TARGET`` and ``log_z/TARGET``. Call it on every rank.

        The numbers are means over the targets of all micro-batches of the step and all ranks.

        Args:
            logits_or_losses: logits (B, T, V), or losses in nats (B, T); then there is no log Z.
            targets_BT: the id of each position's target; -100 for none.

        Raises:
            UserError: the shapes do not fit, or ``modality`` is a function.
        """
        self.losses.add(logits_or_losses, targets_BT)

    def _due(self, previous: int, step: int) -> bool:
        """Return whether a probe is due: the first probe, an overdue one, or one at a multiple of ``every_n_steps``.

        With several optimizers, a trainer's step number rises by more than 1 at a time and can skip a multiple. A
        probe is then due at the first step after this multiple.
        """
        every, done = self.every_n_steps, step - (self._started or 0)
        if not every:
            return False
        is_first = not self._tried and done >= min(FIRST_PROBE, every)
        return is_first or self._overdue or step // every > previous // every

    def probe(self, **inputs: Any) -> Statistics:
        """Return the statistics of a probe with these inputs, merged over ranks; they are not written or logged.

        `Statistics.flat` converts them to ``{tag: number}``.
        """
        self.prober.autocast = self._last_call.autocast
        return self.prober.probe(Inputs(self.model, (), inputs).copied())

    def close(self, status: str = "completed") -> None:
        """Remove the hook and close the files; a second call does nothing.

        Args:
            status: the run's status in ``status.json``: completed, failed or interrupted.
        """
        if self._closed:
            return
        self._closed = True
        if status == "completed":  # after a failure, another rank may not get here
            self._write({}, None)
        self._hook.remove()
        self._last_call.unwrap(self.model)
        self._last_call.take(self.model)
        if self.updates is not None:
            self.updates.close()
        self.output.close(self.steps, status)

    # The probe

    def _values(self, call: Inputs | None, is_copy: bool) -> dict[str, float]:
        """Return the numbers of a probe of the last call; empty if its batch is empty or no copy on any rank."""
        if call is not None:
            self._last_call.check(call)
        ids = None if call is None else call.ids
        is_empty = ids is not None and not ids[1].is_nested and not ids[1].numel()
        uncalled, self._overdue = agreed(self.prober.device, call is None, is_empty or not is_copy)
        if uncalled or call is None:
            raise UserError(
                f"the watched {type(self.model).__name__} was not called with gradients before step {self.steps}: "
                "attach the object that the training loop calls (the result of torch.compile or "
                "DistributedDataParallel), before its first call"
            )
        if self._overdue:
            return {}
        self._tried = True
        start = 0.0 if self._summarized else self._synchronized_time()
        self.prober.autocast = self._last_call.autocast
        values = self.prober.probe(call).flat()
        assert self.layers is not None
        values |= {"attn_layers_seen": self.layers.seen, "attn_layers_hidden": len(self.layers.hidden)}
        if not self._summarized:
            self._print_summary(self._synchronized_time() - start, values, call)
            self._summarized = True
        return values

    def _write(self, values: dict[str, float], call: Inputs | None) -> None:
        """Write and log the numbers of this step and the losses since the last call, and check them for alarms."""
        lines = self.losses.lines()
        if values:
            lines[self.steps] = lines.get(self.steps, {}) | values
        # The logarithm of a logit that is 0 is -inf, and no fault.
        is_bad = any(not math.isfinite(x) and x != -math.inf for line in lines.values() for x in line.values())
        before, self._bad = self._bad, agreed(self.prober.device, is_bad)[0]
        site = self._bad_site(call) if self._bad and not before else None
        for step, line in lines.items() if rank() == 0 else ():
            self.output.write(step, line, step == self.steps, site)

    def _bad_site(self, call: Inputs | None) -> str | None:
        """Return the first place that is not finite, on the first rank that has one: a gradient, which the update
        wrote into the weights, or else a weight, or the output of a module; None with FSDP."""
        if any(isinstance(p, DTensor) for p in self.model.parameters()) or any(
            hasattr(module, "_fsdp_wrapped_module") for module in self.model.modules()
        ):
            return None
        site = None if self.updates is None else self.updates.bad_gradient
        if site is None and call is not None:
            with contextlib.suppress(Exception):  # the forward may fail on these values; training goes on
                site = self.prober.bad_site(call)
        return first_of_ranks(site)

    @contextlib.contextmanager
    def _going_on(self, what: str) -> Iterator[None]:
        """Print why a measurement failed, once for each reason; with ``strict`` raise the error."""
        try:
            yield
        except Exception as error:
            if self.strict or getattr(error, "is_fatal", False):
                raise
            self._tried = True
            reason = " ".join(str(error).split()) or type(error).__name__
            if reason not in self._failures and not getattr(error, "is_elsewhere", False):
                self._failures.add(reason)
                print(
                    f"mmqk: no {what} at step {self.steps}, training goes on: {reason} (strict=True raises the error; "
                    "a later failure of the same kind prints nothing)",
                    flush=True,
                )

    def _attention_note(self, call: Inputs) -> str:
        """Return a note of the QK-Norm, scale and cap of the attention calls; empty if they cannot be read, or with
        several ranks."""
        from mmqk.monitors.preflight.reading import fingerprint, read_calls

        if world_size() > 1:
            return ""
        with contextlib.suppress(Exception):  # a model may refuse a forward pass with gradients in evaluation mode
            modalities = None if call.ids is not None else self.prober.modalities
            seen = read_calls(call, modalities, autocast=self.prober.autocast)
            read = [x.call for x in seen if x.call is not None]
            scales = ", ".join(sorted({f"{x.scale:.3g}" for x in read}))
            caps = ", ".join(sorted({"none" if x.softcap is None else f"{x.softcap:g}" for x in read}))
            return f"{fingerprint(seen)}; scale {scales}; cap {caps}" if read else ""
        return ""

    def _synchronized_time(self) -> float:
        """Wait until the device has finished its work, and return the time in seconds."""
        if self.prober.device.type != "cpu":
            torch.get_device_module(self.prober.device).synchronize(self.prober.device)
        return time.perf_counter()

    def _print_summary(self, seconds: float, values: dict[str, float], call: Inputs) -> None:
        assert self.prober.tokens_M is not None
        tokens_M = summed(self.prober.tokens_M)
        if rank() == 0:
            prober, tokens = self.prober, dict(zip(self.prober.names, tokens_M.tolist(), strict=True))
            step_seconds = [end - start for start, end in itertools.pairwise(self._step_times)]
            parts = summary_parts(prober, tokens, seconds, step_seconds, self.every_n_steps)
            if prober.changed:
                changed = some(sorted(prober.changed), 1)
                parts.append(f"changed by the forward and restored after the probe: {changed}")
            parts += [self._attention_note(call), prober.modalities.origin]
            parts.append(missing_series(values, prober.modalities.names))
            print(f"mmqk: {' · '.join(filter(None, parts))}", flush=True)
            if not prober.modalities.origin:
                warn_of_absent(tokens)
