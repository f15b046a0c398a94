"""Runs the probe of a third-party model: one forward pass over the first sequences of a batch, on every rank.

Shapes: B batch, T tokens, V vocabulary, M modalities.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmqk.distributed import rank, world_size
from mmqk.monitors.adapters import Adapter, clean, device_of, tensors_in
from mmqk.monitors.collect import Statistics
from mmqk.monitors.foreign.capture import Capture, watching
from mmqk.monitors.foreign.inputs import Inputs, named_tensors
from mmqk.monitors.foreign.isolate import isolated
from mmqk.monitors.foreign.layers import Layers, add_matrices
from mmqk.monitors.foreign.measurement import CallRecord, Measurement, ProbeError, agreed, failed_here
from mmqk.monitors.foreign.trace import Origins
from mmqk.monitors.formulas.reduce import kind_of
from mmqk.monitors.modalities import Modalities, Side, sides_of_batch
from mmqk.store.errors import UserError


@dataclass
class Prober:
    """Probes a model with the options of `attach`.

    Attributes:
        autocast: whether the training step calls the model under autocast.
        whole_batch: whether a probe of the first sequences failed, and one of the whole batch did not.
        changed: what the forward of a probe changed, and was restored.
        layers: layers with and without measured attention in the last probe.
        records: the attention calls of the last probe.
        tokens_M: number of tokens of each modality of all sides in the last probe.
        names: names of these modalities.
    """

    model: nn.Module
    modalities: Modalities
    sequences: int
    adapter: Adapter | None
    sides: dict[str, tuple[str, Modalities | None]]
    matrices: bool
    autocast: bool = False
    whole_batch: bool = False
    changed: set[str] = field(default_factory=set)
    layers: Layers | None = None
    records: list[CallRecord] = field(default_factory=list)
    tokens_M: Tensor | None = None
    names: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return device_of(self.model)

    def probe(self, inputs: Inputs) -> Statistics:
        """Probe the first sequences of a batch, or the whole batch if a probe of the first ones fails."""
        B = inputs.rows
        sequences = B if self.whole_batch else self.sequences
        try:
            return self._probe_rows(inputs, sequences)
        except ProbeError as error:
            if error.is_final or not agreed(self.device, sequences < B)[0]:
                raise
            reason = error
        statistics = self._probe_rows(inputs, B)
        self.whole_batch = True
        if rank() == 0:
            print(f"mmqk: the probe uses all {B} sequences of the batch, not {sequences}: {reason}", flush=True)
        return statistics

    @torch.no_grad()
    def bad_site(self, inputs: Inputs) -> str | None:
        """Return the first weight, or else the first output of a module, with a NaN or an infinity, and in which
        tokens it is; None if all are finite. It runs one forward pass over the first sequences."""
        root = inputs.root
        for name, p in root.named_parameters():
            if kind := kind_of(p):
                return f"the weight {clean(name)}, which is {kind}"
        inputs = inputs.first(self.sequences).copied()
        modality_BT = self.modalities.of(inputs)
        found: list[str] = []

        def check(path: str, output: Any) -> None:
            bad = next((x for x in tensors_in(output) if kind_of(x)), None)
            if bad is not None and not found:
                where = self._bad_tokens(bad, modality_BT)
                found.append(f"the output of {clean(path) or 'the model'}, which is {kind_of(bad)}{where}")

        with isolated(root), ExitStack() as stack:
            for path, module in root.named_modules():
                stack.enter_context(module.register_forward_hook(lambda _, __, out, path=path: check(path, out)))
            root(*inputs.args, **inputs.kwargs)
        return found[0] if found else None

    def _bad_tokens(self, x: Tensor, modality_BT: Tensor) -> str:
        """Return how many tokens of each modality have values that are not finite, as in " in 3 of 24 image tokens";
        empty if x is not (B, T, ...)."""
        if x.shape[:2] != modality_BT.shape:
            return ""
        is_bad_BT = ~torch.isfinite(x).reshape(*modality_BT.shape, -1).all(-1).to(modality_BT.device)
        of_names = [(name, modality_BT == m) for m, name in enumerate(self.modalities.names)]
        counts = [(int((of & is_bad_BT).sum()), int(of.sum()), name) for name, of in of_names]
        words = " and ".join(f"{n} of {total} {name} tokens" for n, total, name in counts if n)
        return f" in {words}" if words else ""

    def _probe_rows(self, inputs: Inputs, sequences: int) -> Statistics:
        """Probe the first sequences of a batch. If this fails on one rank, it raises an error on every rank.

        Raises:
            UserError: what a user has to change.
            ProbeError: another error, or an error on another rank.
        """
        root, device, B = inputs.root, self.device, inputs.rows
        rows, in_forward = min(B, sequences), False
        try:
            dtypes = {p.dtype for p in root.parameters() if p.is_floating_point()}
            # Several dtypes need autocast, and so does a half-precision model that was called under autocast.
            one_dtype = len(dtypes) <= 1 and (dtypes <= {torch.float32} or not self.autocast)
            dtype = torch.float32 if dtypes == {torch.float32} else None
            first = inputs.first(rows, dtype)
            with torch.no_grad():
                modality_BT, sources = self._modality_and_sources(first)
            if rows < B == len(modality_BT):
                raise UserError(
                    f"the modality function returned {B} rows, but the probe uses {rows} of the batch's {B} "
                    f"sequences: use only the inputs that the function gets, or call attach with sequences={B}"
                )
            agreed(device)
            in_forward = True
            for source in sources:
                copy = first.copied()  # the forward may edit them
                measurement = self._measurement(copy, modality_BT.to(device), source)
                capture = Capture(root, rows, measurement, Origins(copy))
                with isolated(root, one_dtype, self.autocast) as state, watching(capture):
                    output = root(*copy.args, **copy.kwargs)
                self.changed |= state.changed
                if measurement.main_used:
                    break
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                return self._finished(measurement, capture, output, copy)
        except ProbeError:  # on another rank
            raise
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

    def _finished(self, measurement: Measurement, capture: Capture, output: Any, inputs: Inputs) -> Statistics:
        """Return the statistics of the forward pass, merged over ranks, and store its layers, records and tokens."""
        measurement.residual_stream(capture.stream)
        self._output_softmax(measurement, capture, output, inputs)
        if self.matrices:
            records = [measurement.records[number - 1] for number in measurement.main_calls]
            add_matrices(measurement.main.collector.statistics, capture.root, [(r.place, r.path) for r in records])
        statistics = measurement.finished()
        sequences = {"sum": torch.tensor([float(inputs.rows)], device=measurement.device)}
        statistics.add(["probe_sequences"], sequences, lambda raw: (raw["sum"], torch.ones_like(raw["sum"])))
        agreed(measurement.device)
        statistics = statistics.merged()
        reason = "cross-attention written with matmul and softmax"
        paths = capture.cross_products - capture.products - {record.path for record in measurement.records}
        measurement.records += [CallRecord(path, not_measured=reason, other_tokens=True) for path in sorted(paths)]
        self.layers = capture.layers()
        # Keep no reference to the measurement: it holds masks of shape (B, T, T).
        self.records = measurement.records
        sides = [side for side in measurement.sides if side.modality_BT is not None]
        self.tokens_M = torch.cat([side.collector.selected_MBT.sum((1, 2)) for side in sides])
        self.names = tuple(name for side in sides for name in side.names)
        return statistics

    def _modality_and_sources(self, inputs: Inputs) -> tuple[Tensor, list[frozenset[str] | None]]:
        """Return the modality of each token (B, T), and the sets of inputs that these tokens may come from.

        The most likely set comes first. None stands for any input.
        """
        sources: list[frozenset[str] | None] = [] if inputs.ids is None else [frozenset({inputs.ids[0]})]
        if self.modalities.ranges is not None:
            return self.modalities.of(inputs), sources
        origins = Origins(inputs, bools=True)
        with origins:
            modality_BT = self.modalities.of(inputs)
        origin = origins.of(modality_BT)
        if origin is not None and origin.inputs and origin.inputs not in sources:
            sources.insert(0, origin.inputs)
        return modality_BT, [*sources, None]

    def _measurement(self, inputs: Inputs, modality_BT: Tensor, source: frozenset[str] | None) -> Measurement:
        mask = inputs.padding(source)
        if mask is not None and mask.shape != modality_BT.shape:
            warnings.warn(
                f"mmqk: the padding mask has shape {tuple(mask.shape)}, but modality describes tokens of shape "
                f"{tuple(modality_BT.shape)}, so padding is counted: in the modality function, return -1 for padding",
                stacklevel=7,
            )
        if (document_BT := inputs.documents(modality_BT.shape)) is not None:
            document_BT = document_BT.to(modality_BT.device)
        main = Side("", self.modalities.names, source, self.modalities, modality_BT, mask, document_BT)
        others = sides_of_batch(self.sides, inputs, main, modality_BT.device)
        return Measurement(main, others, self.adapter, collective=world_size() > 1)

    def _output_softmax(self, measurement: Measurement, capture: Capture, output: Any, inputs: Inputs) -> None:
        """Add statistics of the output softmax if the model returns logits and the target ids are known.

        The targets are the next tokens, so a model in which every token sees all others has none.
        """
        ranges = self.modalities.ranges
        if ranges is None or inputs.ids is None or agreed(measurement.device, measurement.main.sees_all)[0]:
            return
        least = max((part.stop for parts in ranges.values() for part in parts), default=0)
        logits_BTV = find_logits(output, measurement.modality_BT.shape, least, capture.root)
        if logits_BTV is None or not measurement.may_be_main(capture.origins.of(logits_BTV)):
            return
        # Chameleon's forward replaces the logits of image ids by the smallest number of the dtype.
        if not (logits_BTV == torch.finfo(logits_BTV.dtype).min).any():
            measurement.output_softmax(logits_BTV, next_tokens_of(output, inputs, measurement.valid_BT))


def find_logits(output: Any, shape: torch.Size, least: int, root: nn.Module) -> Tensor | None:
    """Return the logits (B, T, V) in the output of a model, or None.

    The logits are the tensor named ``logits``, or a tensor whose last axis has as many entries as an
    embedding has rows.

    Args:
        output: the output of the model.
        shape: (B, T).
        least: the smallest possible V.
        root: the model.
    """
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    rows = {m.num_embeddings for m in root.modules() if isinstance(m, nn.Embedding)}
    candidates = [named] if isinstance(named, Tensor) else list(output) if isinstance(output, tuple) else [output]
    for x in candidates:
        fits = isinstance(x, Tensor) and x.ndim == 3 and x.shape[:2] == shape and x.is_floating_point()
        if fits and x.shape[-1] >= least and (x is named or x.shape[-1] in rows):
            return x
    return None


def next_tokens_of(output: Any, inputs: Inputs, valid_BT: Tensor) -> Tensor:
    """Return (B, T) bool: positions with a next token that is not padding and, in transformers, has a label."""
    target_mask_BT = valid_BT & valid_BT.roll(-1, 1)
    if type(output).__module__.partition(".")[0] == "transformers":
        for name, labels in named_tensors(inputs.named):
            if name == "labels" and labels.shape == target_mask_BT.shape:
                target_mask_BT = target_mask_BT & (labels.to(valid_BT.device).roll(-1, 1) != -100)
    target_mask_BT[:, -1] = False
    return target_mask_BT
