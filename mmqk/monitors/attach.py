"""`attach` measures a third-party model while it trains."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmqk.distributed import rank, summed, world_size
from mmqk.monitors.adapters import Adapter, adapter_for
from mmqk.monitors.foreign.capture import Capture, watching
from mmqk.monitors.foreign.inputs import (
    Inputs,
    LastCall,
    Modalities,
    Modality,
    find_ids,
    named_inputs,
    padding_mask,
    tensors,
)
from mmqk.monitors.foreign.isolate import copied, isolated, unwrapped
from mmqk.monitors.foreign.layers import Layers, add_matrices
from mmqk.monitors.foreign.measurement import Measurement, SiteRecord
from mmqk.monitors.foreign.origins import Origins, Tracing
from mmqk.monitors.foreign.output import find_logits, targets_of
from mmqk.monitors.foreign.ranks import FailedElsewhereError, ProbeError, agreed, failed_here
from mmqk.monitors.foreign.rows import batch_size, first_rows
from mmqk.monitors.foreign.sides import Side, Sides, check_sides, sides_of_batch
from mmqk.monitors.record import Probe, over_layers
from mmqk.monitors.summary import (
    WatchFolder,
    missing_series,
    restored_note,
    summary_line,
    warn_of_absent,
    warn_of_mask,
    warn_of_padding,
)
from mmqk.store.errors import UserError

Log = Callable[..., Any]  # called as log({tag: number}, step=int)

# The first probe runs at this step at the latest: early enough to report a user error soon, late enough to time the
# steps before it.
FIRST_PROBE = 10


def attach(
    model: nn.Module,
    *,
    modality: Modality,
    every_n_steps: int = 100,
    sequences: int = 4,
    out: str | Path | None = None,
    log: Log | None = None,
    names: Sequence[str] = ("text", "image"),
    adapter: Adapter | None = None,
    sides: Sides | None = None,
    matrices: bool = False,
    strict: bool = False,
) -> Watch:
    """Measure attention logits, entropy and norms by layer and modality while ``model`` trains.

    Call ``watch.step()`` after each optimizer step. Every ``every_n_steps`` steps a probe runs the model once more on
    the first sequences of the last batch: eagerly, in evaluation mode, outside autocast, without gradients. Probes
    leave the weights of the run unchanged, bit for bit.

    Args:
        model: the object that the training loop calls, with its torch.compile, FSDP or DDP wrapper if it has one.
        modality: the id range or ranges of each modality except text, ``{"image": range(4, 8196)}``, or ``{}`` if all
            ids are text; or a function that gets the model's inputs by name and returns (B, T), the modality number
            of each token.
        every_n_steps: number of steps between probes; the first probe runs after at most 10 steps. 0 disables probes.
        sequences: number of sequences in a probe, on each rank.
        out: folder for ``metrics.jsonl``, which mmqk's tools read.
        log: called as ``log({tag: number}, step=int)``, for instance ``wandb.log``.
        names: if ``modality`` is a function, the names of modalities 0, 1, …; ignored if ``modality`` has ranges.
        adapter: further tensors to measure; None uses mmqk's adapter for the model's transformers or timm layers.
        sides: further token sequences, by their name in tags. A value is the name of a model input,
            ``{"patch": "pixel_values"}``, or the name and the modality of the input,
            ``{"decoder": ("decoder_input_ids", {"image": range(4, 8196)})}``. Cross-attention between declared sides
            is measured as ``cross_...``.
        matrices: also measure the norm, spectral norm and stable rank of each matrix of the layers with attention.
            This costs one singular value decomposition per matrix and is not supported with FSDP.
        strict: raise the error of a probe that fails; by default the probe is skipped, and a line gives the reason.

    Raises:
        UserError: an invalid range or name, or a count below its minimum.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"model is {model!r}: pass the nn.Module that the training loop calls")
    if every_n_steps < 0 or every_n_steps != int(every_n_steps):
        raise UserError(f"every_n_steps is {every_n_steps}: give a whole number of steps, or 0 for no probes")
    if sequences < 1:
        raise UserError(f"sequences is {sequences}: a probe needs at least 1")
    modalities = Modalities(modality, names)
    return Watch(
        model,
        modalities,
        every_n_steps,
        sequences,
        None if out is None else Path(out),
        log,
        adapter or adapter_for(unwrapped(model)),
        check_sides(sides or {}, modalities.names),
        matrices,
        strict,
    )


@dataclass
class Watch:
    """The handle that `attach` returns.

    Attributes:
        steps: optimizer steps so far. Set it before the first step of a resumed run.
        layers: layers with and without measured attention in the last probe.
    """

    model: nn.Module
    modalities: Modalities
    every_n_steps: int
    sequences: int
    out: Path | None
    log: Log | None
    adapter: Adapter | None
    sides: dict[str, tuple[str, Modalities | None]] = field(default_factory=dict)
    matrices: bool = False
    strict: bool = False
    steps: int = 0
    layers: Layers | None = None
    _last_call: LastCall = field(default_factory=LastCall)
    _folder: WatchFolder | None = None
    _started: int = 0  # value of ``steps`` before the first step
    _step_times: list[float] | None = field(default_factory=list)  # None after the first probe
    _closed: bool = False
    _tried: bool = False  # a probe was due and had a batch
    _whole_batch: bool = False  # a probe of the first sequences failed, and one of the whole batch did not
    _failures: set[str] = field(default_factory=set)
    _overdue: bool = False  # a probe was due, but the batch was empty
    _changed: set[str] = field(default_factory=set)  # what a probe's forward changed, and was restored
    _outgrown: bool = False  # whether the warning about a mask that logits outgrow was shown
    # Results of the last probe; the token counts and names cover the modalities of all sides.
    _records: list[SiteRecord] = field(default_factory=list)
    _tokens_M: Tensor | None = None
    _names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._last_call.copying = self.every_n_steps > 0
        self._hook = self.model.register_forward_pre_hook(self._last_call, with_kwargs=True)
        self._last_call.wrap(self.model)

    def step(self, number: int | None = None) -> None:
        """Count a step, and probe if a probe is due. Call this after each optimizer step, on every rank.

        Args:
            number: the trainer's step number; by default, the number of calls of this method.

        Raises:
            UserError: ``out`` contains steps of another run. With ``strict``, also: a probe is due but the model was
                not called.
            RuntimeError: with ``strict`` or FSDP on several ranks, the forward pass of the probe failed.
        """
        if self._closed:
            return
        self._last_call.wrap(self.model)  # the model may have been compiled since the last step
        if self._step_times is not None and not self._step_times:
            resumed = self.steps  # as the caller has set it; 0 for a new run
            self.steps = self._started = self.steps if number is None else number - 1
            if self.out is not None and self.every_n_steps and rank() == 0:
                self._folder = WatchFolder(self.out, resumed)
        previous, self.steps = self.steps, self.steps + 1 if number is None else number
        if self._step_times is not None and not self._tried:
            self._step_times.append(time.perf_counter())
        is_due = self._due(previous, self.steps)
        try:
            is_copy, call = self._last_call.is_copy, self._last_call.take()
            values = self._values(call, is_copy) if is_due else None
        except Exception as error:
            if self.strict or getattr(error, "is_fatal", False):
                raise
            self._skip(error)
        else:
            if values is not None:
                self._write(values)
        self._last_call.copying = self._due(self.steps, 2 * self.steps - previous)

    def _due(self, previous: int, step: int) -> bool:
        """Return whether a probe is due: the first probe, an overdue one, or one at a multiple of ``every_n_steps``.

        With several optimizers, a trainer's step number rises by more than 1 at a time and can skip a multiple. A
        probe is then due at the first step after this multiple.
        """
        every, done = self.every_n_steps, step - self._started
        if not every:
            return False
        is_first = not self._tried and done >= min(FIRST_PROBE, every)
        return is_first or self._overdue or step // every > previous // every

    def probe(self, **inputs: Any) -> Probe:
        """Return the probe of a forward pass with these inputs, merged over ranks. The probe is not written
        or logged.

        `Probe.flat` converts it to ``{tag: number}``.
        """
        return self._probe(*copied((), inputs, unwrapped(self.model)))

    def close(self, status: str = "completed") -> None:
        """Remove the hook and close the files; a second call does nothing.

        Args:
            status: the run's status in ``status.json``: completed, failed or interrupted.
        """
        if self._closed:
            return
        self._closed = True
        self._hook.remove()
        self._last_call.unwrap(self.model)
        self._last_call.take()
        if self._folder is not None:
            self._folder.close(self.steps, status)

    # The probe

    def _probe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Probe:
        """Probe the first sequences of a batch, or the whole batch if a probe of the first ones fails."""
        B = batch_size(named_inputs(self.model, args, kwargs))
        sequences = B if self._whole_batch else self.sequences
        try:
            return self._probe_rows(args, kwargs, sequences)
        except ProbeError as error:
            if error.is_final or not agreed(self._device, sequences < B)[0]:
                raise
            reason = error
        probe = self._probe_rows(args, kwargs, B)
        self._whole_batch = True
        if rank() == 0:
            print(f"mmqk: the probe uses all {B} sequences of the batch, not {sequences}: {reason}", flush=True)
        return probe

    def _probe_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any], sequences: int) -> Probe:
        """Probe the first sequences of a batch. If this fails on one rank, it raises an error on every rank.

        Raises:
            UserError: what a user has to change.
            ProbeError: another error, or an error on another rank.
        """
        root, device = unwrapped(self.model), self._device
        in_forward = False
        try:
            inputs = named_inputs(self.model, args, kwargs)
            _check_inputs(inputs, root)
            B = batch_size(inputs)
            rows = min(B, sequences)
            dtypes = {p.dtype for p in root.parameters() if p.is_floating_point()}
            # Several dtypes need autocast, and so does a half-precision model that was called under autocast.
            one_dtype = len(dtypes) <= 1 and (dtypes <= {torch.float32} or not self._last_call.autocast)
            dtype = torch.float32 if dtypes == {torch.float32} else None
            args, kwargs = first_rows((args, kwargs), inputs, root, rows, dtype)
            inputs = named_inputs(self.model, args, kwargs)
            with torch.no_grad():
                modality_BT, sources = self._modality_and_sources(inputs)
            if rows < B == len(modality_BT):
                raise UserError(
                    f"the modality function returned {B} rows, but the probe uses {rows} of the batch's {B} "
                    f"sequences: use only the inputs that the function gets, or call attach with sequences={B}"
                )
            agreed(device)
            in_forward = True
            for source in sources:
                measurement = self._measurement(inputs, modality_BT.to(device), source, world_size() > 1)
                capture = Capture(root, rows, measurement, Origins(inputs, root))
                isolation = isolated(root, device, inputs, one_dtype, self._last_call.autocast)
                with isolation as state, watching(capture):
                    output = root(*args, **kwargs)
                self._changed |= state.changed
                if measurement.main_used:
                    break
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                return self._finished(measurement, capture, output, inputs, rows)
        except FailedElsewhereError as error:
            raise ProbeError(str(error), error.is_final) from error
        except Exception as error:
            # With FSDP the other ranks wait for this rank's weights, so they cannot end the probe.
            is_fatal = in_forward and world_size() > 1 and any(hasattr(m, "unshard") for m in root.modules())
            is_user_error = isinstance(error, UserError)
            is_final = is_fatal or failed_here(device, is_user_error or isinstance(error, torch.OutOfMemoryError))
            if is_user_error and not is_fatal:
                raise
            where = f"the probe's forward of {type(root).__name__} (evaluation mode, {rows} of {B} sequences) failed"
            message = f"{where} ({type(error).__name__}: {error})" if in_forward else str(error)
            raise ProbeError(message, is_final, is_fatal) from error

    def _finished(
        self, measurement: Measurement, capture: Capture, output: Any, inputs: Inputs, rows: int
    ) -> Probe:
        """Return the probe after the forward pass, merged over ranks, and store its layers, records and tokens."""
        measurement.residual_stream(capture.stream)
        self._output(measurement, output, inputs, capture.root, capture.origins)
        if self.matrices:
            add_matrices(measurement.main.collector.probe, capture.root, measurement.main_sites())
        probe = measurement.finished()
        probe.add(
            ["probe_sequences"],
            {"sum": torch.tensor([float(rows)], device=measurement.device)},
            lambda raw: (raw["sum"], torch.ones_like(raw["sum"])),
        )
        agreed(measurement.device)
        probe = probe.merged()
        reason = "cross-attention written with matmul and softmax"
        measurement.records += [
            SiteRecord(path, not_measured=reason, other_tokens=True)
            for path in sorted(
                capture.cross_products - capture.products - {record.path for record in measurement.records}
            )
        ]
        self.layers = capture.layers()
        # Keep no reference to the measurement: it holds masks of shape (B, T, T).
        self._records = measurement.records
        sides = [side for side in measurement.sides if side.modality_BT is not None]
        self._tokens_M = torch.cat([side.collector.selected_MBT.sum((1, 2)) for side in sides])
        self._names = tuple(name for side in sides for name in side.names)
        return probe

    def _modality_and_sources(self, inputs: Inputs) -> tuple[Tensor, list[frozenset[str] | None]]:
        """Return the modality of each token (B, T), and the sets of inputs that these tokens may come from.

        The most likely set comes first. None stands for any input.
        """
        ids = find_ids(inputs)
        sources: list[frozenset[str] | None] = [] if ids is None else [frozenset({ids[0]})]
        if self.modalities.ranges is not None:
            return self.modalities.of(inputs), sources
        origins = Origins(inputs, bools=True)
        with Tracing(origins):
            modality_BT = self.modalities.of(inputs)
        origin = origins.of(modality_BT)
        if origin is not None and origin.inputs and origin.inputs not in sources:
            sources.insert(0, origin.inputs)
        return modality_BT, [*sources, None]

    def _measurement(
        self, inputs: Inputs, modality_BT: Tensor, source: frozenset[str] | None, collective: bool
    ) -> Measurement:
        mask = padding_mask(inputs, source)
        if mask is not None and mask.shape != modality_BT.shape:
            warn_of_padding(mask.shape, modality_BT.shape)
        main = Side("", self.modalities.names, source, self.modalities, modality_BT, mask)
        others = sides_of_batch(self.sides, inputs, main, modality_BT.device)
        return Measurement(main, others, self.adapter, collective)

    def _output(
        self, measurement: Measurement, output: Any, inputs: Inputs, root: nn.Module, origins: Origins
    ) -> None:
        """Add statistics of the output softmax if the model returns logits and the target ids are known.

        The targets are the next tokens, so a model in which every token sees all others has none.
        """
        if self.modalities.ranges is None or find_ids(inputs) is None:
            return
        if agreed(measurement.device, measurement.main.sees_all)[0]:
            return
        least = max((part.stop for parts in self.modalities.ranges.values() for part in parts), default=0)
        logits_BTV = find_logits(output, measurement.modality_BT.shape, least, root)
        # Chameleon's forward replaces the logits of image ids by the smallest number of the dtype.
        if logits_BTV is not None and (logits_BTV == torch.finfo(logits_BTV.dtype).min).any():
            return
        if logits_BTV is None or not measurement.may_be_main(origins.of(logits_BTV)):
            return
        measurement.output(logits_BTV, targets_of(output, inputs, measurement.valid_BT))

    def _values(
        self, call: tuple[tuple[Any, ...], dict[str, Any]] | None, is_copy: bool
    ) -> dict[str, float] | None:
        """Return the numbers of a probe of the last call; None if its batch is empty or no copy on any rank."""
        if call is not None:
            self._last_call.check(*call)
        ids = None if call is None else find_ids(named_inputs(self.model, *call))
        is_empty = ids is not None and not ids[1].is_nested and not ids[1].numel()
        uncalled, self._overdue = agreed(self._device, call is None, is_empty or not is_copy)
        if uncalled or call is None:
            raise UserError(
                f"the watched {type(self.model).__name__} was not called with gradients before step {self.steps}: "
                "attach the object that the training loop calls (the result of torch.compile or "
                "DistributedDataParallel), before its first call"
            )
        if self._overdue:
            return None
        is_first, self._tried = self._step_times is not None, True
        start = self._synchronized_time() if is_first else 0.0
        values = self._probe(*call).flat()
        assert self.layers is not None
        values["attn_layers_seen"] = self.layers.seen
        values["attn_layers_hidden"] = len(self.layers.hidden)
        if is_first:
            self._print_summary(self._synchronized_time() - start, values)
            self._step_times = None
        return values

    def _write(self, values: dict[str, float]) -> None:
        if rank() > 0:
            return
        self._outgrown = self._outgrown or warn_of_mask(values, self.steps)
        if self._folder is not None:
            self._folder.write(self.steps, values)
        if self.log is not None:
            self.log(values | over_layers(values), step=self.steps)

    def _skip(self, error: Exception) -> None:
        """Print why a probe failed, once for each reason."""
        self._tried = True
        reason = " ".join(str(error).split()) or type(error).__name__
        if reason in self._failures or isinstance(error.__cause__, FailedElsewhereError):
            return
        self._failures.add(reason)
        print(
            f"mmqk: no probe at step {self.steps}, training goes on: {reason} (strict=True raises the error; a later "
            "probe that fails in the same way prints nothing)",
            flush=True,
        )

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def _synchronized_time(self) -> float:
        """Wait until the device has finished its work, and return the time in seconds."""
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)
        return time.perf_counter()

    def _print_summary(self, seconds: float, values: dict[str, float]) -> None:
        assert self._tokens_M is not None and self.layers is not None and self._step_times is not None
        tokens_M = summed(self._tokens_M)
        if rank() == 0:
            tokens = dict(zip(self._names, tokens_M.tolist(), strict=True))
            step_seconds = [end - start for start, end in itertools.pairwise(self._step_times)]
            line = summary_line(self.layers, tokens, self._records, seconds, step_seconds, self.every_n_steps)
            line += restored_note(self._changed)
            print(line + missing_series(values, self.modalities.names), flush=True)
            warn_of_absent(tokens)


def _check_inputs(inputs: Inputs, root: nn.Module) -> None:
    """Raise UserError for inputs with which a probe cannot run."""
    for name, x in tensors(inputs):
        if x.is_nested:
            raise UserError(
                f"input {name} of {type(root).__name__} is a nested tensor, which a probe cannot measure: pass "
                "padded tensors and an attention_mask, or call attach with every_n_steps=0"
            )
