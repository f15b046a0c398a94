"""`attach` measures a model that mmqk did not build while it trains."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmqk.distributed import summed, world_size
from mmqk.monitors.adapters import Adapter, adapter_for
from mmqk.monitors.measures.reduce import selection
from mmqk.monitors.record import Probe
from mmqk.monitors.third_party.boundary import Boundary, Section
from mmqk.monitors.third_party.capture import Capture, watching
from mmqk.monitors.third_party.folder import Folder
from mmqk.monitors.third_party.inputs import (
    Catcher,
    Inputs,
    Modalities,
    Modality,
    find_ids,
    first_rows,
    named_ids,
    named_inputs,
    sequences_of,
    valid_of,
)
from mmqk.monitors.third_party.introduce import introduction, is_first_rank, missing_series, warn_of_absent
from mmqk.monitors.third_party.isolate import parameters_of_one_dtype, untouched, unwrapped
from mmqk.monitors.third_party.layers import Layers, find_layers
from mmqk.monitors.third_party.origins import Origins, Tracing
from mmqk.monitors.third_party.output import find_logits, targets_of
from mmqk.monitors.third_party.sides import Side, Sides, check_sides, made_sides, mask_of
from mmqk.store.errors import UserError

Log = Callable[..., Any]  # called as log({tag: number}, step=int)

# Step of the first probe: early enough to show a user error, late enough to time the steps before it.
FIRST = 10


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
) -> Watch:
    """Measure attention logits, entropy and norms by layer and modality while ``model`` trains.

    Call ``watch.step()`` after each optimizer step. Every N steps a probe runs the model once more, on the first
    sequences of the last batch: eagerly, in evaluation mode, outside autocast, without gradients or random numbers.
    Probes never change the run's weights, bit for bit.

    Args:
        model: the object that the training loop calls, with its torch.compile, FSDP or DDP wrapper if it has one.
        modality: the id range or ranges of each modality except text, ``{"image": range(4, 8196)}``; or a function
            from the forward's inputs by name to modality numbers (B, T), one for each token of the attention.
        every_n_steps: steps between probes; the first probe comes after at most 10 steps; 0 disables probes.
        sequences: number of sequences of the batch in a probe, on each rank.
        out: folder for ``metrics.jsonl``, which mmqk's tools read.
        log: called as ``log({tag: number}, step=int)``, for instance ``wandb.log``.
        names: names of the modality numbers that a modality function returns.
        adapter: tensors to measure beyond the attention calls; None uses the one for transformers or timm layers.
        sides: further token sequences, by their name in tags: an input of the forward, ``{"patch": "pixel_values"}``,
            or an input and its modality, ``{"decoder": ("decoder_input_ids", {"image": range(4, 8196)})}``.
            Cross-attention between declared sides is measured as ``cross_...``.

    Raises:
        UserError: an invalid range or name, or a count below its minimum.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"model is {model!r}: attach the nn.Module that the training loop calls")
    if every_n_steps < 0 or every_n_steps != int(every_n_steps):
        raise UserError(f"every_n_steps is {every_n_steps}: give a whole number of steps, or 0 for no probes")
    if sequences < 1:
        raise UserError(f"sequences is {sequences}: a probe needs at least 1")
    modalities = Modalities(modality, names)
    declared = check_sides(sides or {}, modalities.names)
    return Watch(
        model,
        modalities,
        every_n_steps,
        sequences,
        None if out is None else Path(out),
        log,
        adapter or adapter_for(model),
        declared,
    )


@dataclass
class Watch:
    """The handle that `attach` returns.

    Attributes:
        steps: optimizer steps so far. A resumed run sets it before its first step.
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
    steps: int = 0
    layers: Layers | None = None
    _catcher: Catcher = field(default_factory=Catcher)
    _folder: Folder | None = None
    _marks: list[float] | None = field(default_factory=list)
    _closed: bool = False
    _late: bool = False  # a probe was due, but the batch was empty
    _sections: list[Section] = field(default_factory=list)  # of the last probe
    _tokens_M: Tensor | None = None
    _names: tuple[str, ...] = ()  # of the modalities of all sides

    def __post_init__(self) -> None:
        self._started = self.steps
        self._hook = self.model.register_forward_pre_hook(self._catcher, with_kwargs=True)
        self._catcher.wrap(self.model)

    def step(self, number: int | None = None) -> None:
        """Call this after each optimizer step, on every rank; it probes if a probe is due.

        Args:
            number: number of the step in the trainer; None counts the calls of this method.

        Raises:
            UserError: a probe is due but the model was not called, or ``out`` contains steps of another run.
            RuntimeError: the probe's forward fails.
        """
        if self._closed:
            return
        self._catcher.wrap(self.model)  # the model may have been compiled since the last step
        if self._marks is not None and not self._marks:
            self.steps = self._started = self.steps if number is None else number - 1
            if self.out is not None and self.every_n_steps and is_first_rank():
                self._folder = Folder(self.out, self._started)
        before, self.steps = self.steps, self.steps + 1 if number is None else number
        if self._marks is not None:
            self._marks.append(time.perf_counter())
        called = self._catcher.take()
        if not self._due(before):
            return
        if called is None:
            raise UserError(
                f"the watched {type(self.model).__name__} was not called with gradients before step {self.steps}: "
                "attach the object that the training loop calls (what torch.compile or DistributedDataParallel "
                "returned), and do so before its first call"
            )
        self._probe_and_write(*called)

    def _due(self, before: int) -> bool:
        """Whether the step passed a multiple of N; with several optimizers a trainer's step number skips some."""
        every, done = self.every_n_steps, self.steps - self._started
        if not every:
            return False
        early = self._marks is not None and done >= min(FIRST, every)
        return early or self._late or self.steps // every > before // every

    def probe(self, **inputs: Any) -> Probe:
        """Probe a forward with these inputs, merged over ranks, without writing or logging.

        ``.flat()`` returns ``{tag: number}``.
        """
        return self._probe((), inputs)

    def close(self, status: str = "completed") -> None:
        """Remove the hook and close the file; a second call does nothing.

        Args:
            status: the run's status for ``status.json``: completed, failed or interrupted.
        """
        if self._closed:
            return
        self._closed = True
        self._hook.remove()
        self._catcher.unwrap(self.model)
        self._catcher.take()
        if self._folder is not None:
            self._folder.close(self.steps, status)

    # The probe

    def _probe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Probe:
        root, collective = unwrapped(self.model), world_size() > 1
        inputs = named_inputs(self.model, args, kwargs)
        if inputs.get("past_key_values") is not None:
            raise UserError(
                f"{type(root).__name__} gets past_key_values, a cache that the probe's forward would change: "
                "train without a cache, or call attach with every_n_steps=0"
            )
        B = sequences_of(inputs)
        rows = min(B, self.sequences)
        weight = next((p for p in root.parameters() if p.is_floating_point()), None)
        device = torch.device("cpu") if weight is None else weight.device
        alone = parameters_of_one_dtype(root)
        single = weight is not None and alone and weight.dtype == torch.float32
        args, kwargs = first_rows((args, kwargs), B, rows, torch.float32 if single else None)
        inputs = named_inputs(self.model, args, kwargs)
        with torch.no_grad():
            modality_BT, sources = self._modality_and_sources(inputs)
        try:
            for source in sources:
                boundary = self._boundary(inputs, modality_BT.to(device), source, collective)
                capture = Capture(root, rows, boundary, Origins(inputs, root))
                with untouched(root, device, alone, self._catcher.autocast), watching(capture):
                    output = root(*args, **kwargs)
                if boundary.main_seen:
                    break
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            advice = (
                f"; if the model needs the whole batch, call attach with sequences={B}" if rows < B else ""
            )
            raise RuntimeError(
                f"the probe's forward of {type(root).__name__} (evaluation mode, {rows} of {B} sequences) failed "
                f"({type(error).__name__}: {error}){advice}"
            ) from error
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            boundary.see_stream(capture.stream)
            self._output(boundary, output, inputs, root, capture.origins)
            probe = boundary.finished()
            probe.add(
                ["probe_sequences"],
                {"sum": torch.tensor([float(rows)], device=device)},
                lambda raw: (raw["sum"], torch.ones_like(raw["sum"])),
            )
            probe = probe.merged()
        for path in sorted(capture.crossed - capture.products):
            by_hand = "cross-attention from plain matmul and softmax"
            boundary.sections.append(Section(path, left_out=by_hand, elsewhere=True))
        calls = [section for section in boundary.sections if section.call]
        self.layers = find_layers(
            [section.path for section in calls if section.left_out is None and not section.cross],
            {section.path for section in calls if section.left_out is not None and not section.elsewhere},
            {section.path for section in calls},
            capture.ran, capture.kinds, capture.softmaxes, capture.products,
        )  # fmt: skip
        # Keep only the sections: the boundary also holds masks of shape (B, T, T).
        self._sections = boundary.sections
        ready = [side for side in boundary.sides if side.ready]
        self._tokens_M = torch.cat([selection(*side.tokens, len(side.names)).sum((1, 2)) for side in ready])
        self._names = tuple(name for side in ready for name in side.names)
        return probe

    def _modality_and_sources(self, inputs: Inputs) -> tuple[Tensor, list[frozenset[str] | None]]:
        """Modality (B, T), and candidates for the inputs that it describes, most likely first; None is any input."""
        ids = named_ids(inputs)
        sources: list[frozenset[str] | None] = [] if ids is None else [frozenset({ids[0]})]
        if self.modalities.ranges is not None:
            return self.modalities.of(inputs), sources
        read = Origins(inputs, bools=True)
        with Tracing(read):
            modality_BT = self.modalities.of(inputs)
        origin = read.of(modality_BT)
        if origin is not None and origin.inputs and origin.inputs not in sources:
            sources.insert(0, origin.inputs)
        return modality_BT, [*sources, None]

    def _boundary(
        self, inputs: Inputs, modality_BT: Tensor, source: frozenset[str] | None, collective: bool
    ) -> Boundary:
        device = modality_BT.device
        valid_BT = valid_of(inputs, modality_BT, mask_of(source, inputs)).to(device)
        main = Side("", self.modalities.names, source, self.modalities, modality_BT, valid_BT)
        return Boundary(main, made_sides(self.sides, inputs, main, device), self.adapter, collective)

    def _output(self, boundary: Boundary, output: Any, inputs: Inputs, root: nn.Module, origins: Origins) -> None:
        """Add statistics of the output softmax if the forward returns logits and the target ids are known."""
        if self.modalities.ranges is None or find_ids(inputs) is None:
            return
        least = max(part.stop for parts in self.modalities.ranges.values() for part in parts)
        logits_BTV = find_logits(output, boundary.modality_BT.shape, least, root)
        if logits_BTV is None or not boundary.may_be_main(origins.of(logits_BTV)):
            return
        boundary.output(logits_BTV, targets_of(output, inputs, boundary.valid_BT))

    def _probe_and_write(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = find_ids(named_inputs(self.model, args, kwargs))
        self._late = self._on_any_rank(ids is not None and not ids.numel())
        if self._late:
            return
        first = self._marks is not None
        start = self._clock() if first else 0.0
        values = self._probe(args, kwargs).flat()
        assert self.layers is not None
        values["attn_layers_seen"], values["attn_layers_hidden"] = (
            len(self.layers.numbers),
            len(self.layers.hidden),
        )
        if first:
            self._introduce(self._clock() - start, values)
            self._marks = None
        if not is_first_rank():
            return
        if self._folder is not None:
            self._folder.write(self.steps, values)
        if self.log is not None:
            self.log(values, step=self.steps)

    def _on_any_rank(self, here: bool) -> bool:
        """Whether ``here`` is true on any rank."""
        if world_size() == 1:
            return here
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        return bool(summed(torch.tensor(float(here), device=device)))

    def _clock(self) -> float:
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        return time.perf_counter()

    def _introduce(self, seconds: float, values: dict[str, float]) -> None:
        assert self._tokens_M is not None and self.layers is not None and self._marks is not None
        tokens_M = summed(self._tokens_M)
        if is_first_rank():
            tokens = dict(zip(self._names, tokens_M.tolist(), strict=True))
            gaps = [after - before for before, after in itertools.pairwise(self._marks)]
            line = introduction(self.layers, tokens, self._sections, seconds, gaps, self.every_n_steps)
            missing = missing_series(values, self.modalities.names)
            print(line + missing, flush=True)
            warn_of_absent(tokens)
