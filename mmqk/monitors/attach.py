"""`attach`: watch a model that mmqk did not build."""

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

# Of the first probe: early enough to see a mistake, late enough to know what a step costs.
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
    """Watch attention logits, entropy and norms by layer and modality while ``model`` trains.

    Call ``watch.step()`` after each optimizer step. Every N of them a probe runs the model once more, on the first
    sequences of the last batch: eagerly, in evaluation mode, outside autocast, without gradients or random numbers.
    The weights of the run are those of one without, bit for bit.

    Args:
        model: the object that the training loop calls: compiled, FSDP or DDP if that is what it is.
        modality: ``{"image": range(4, 8196)}``, ids of each modality but text, a range or several; or a function of
            the forward's inputs by name to modality numbers (B, T), one for each token that attention sees.
        every_n_steps: between two probes; the first comes after 10 steps at the latest, and 0 is none at all.
        sequences: how many of a batch a probe looks at, on each rank.
        out: folder for ``metrics.jsonl``, which mmqk's own tools read.
        log: called as ``log({tag: number}, step=int)``, for instance ``wandb.log``.
        names: of the numbers that a modality function gives.
        adapter: what to take beside the attention calls; None finds one for layers of transformers and timm.
        sides: further tokens that attention is over, by the name that their statistics get: an input of the forward,
            ``{"patch": "pixel_values"}``, or that and its modality, ``{"decoder": ("decoder_input_ids", {"image":
            range(4, 8196)})}``. Cross-attention between declared sides is then measured, as ``cross_...``.

    Raises:
        UserError: ranges or names that cannot be, a count below its least.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"model is {model!r}: attach the nn.Module that the training loop calls")
    if every_n_steps < 0 or every_n_steps != int(every_n_steps):
        raise UserError(f"every_n_steps is {every_n_steps}: give 0 for no probes, or more, in whole steps")
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
    """What `attach` gives; made by it.

    Attributes:
        steps: optimizer steps so far. A run that resumes sets it before its first step.
        layers: which layers the last probe saw.
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
    _late: bool = False  # the batch of the step that was due was empty
    _sections: list[Section] = field(default_factory=list)  # of the last probe
    _tokens_M: Tensor | None = None
    _names: tuple[str, ...] = ()  # of the modalities of all sides

    def __post_init__(self) -> None:
        self._started = self.steps
        self._hook = self.model.register_forward_pre_hook(self._catcher, with_kwargs=True)
        self._catcher.wrap(self.model)

    def step(self, number: int | None = None) -> None:
        """One optimizer step is done. Under several ranks each of them has to say so.

        Args:
            number: of the step, where a trainer counts; None counts here.

        Raises:
            UserError: a probe is due and the model was not called, or ``out`` holds later steps of another run.
            RuntimeError: the forward on the first sequences fails.
        """
        if self._closed:
            return
        self._catcher.wrap(self.model)  # compiled since
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
        """Whether a multiple of N was passed: several optimizers, or a trainer that skips, count by more than 1."""
        every, done = self.every_n_steps, self.steps - self._started
        if not every:
            return False
        early = self._marks is not None and done >= min(FIRST, every)
        return early or self._late or self.steps // every > before // every

    def probe(self, **inputs: Any) -> Probe:
        """Statistics of a forward with these inputs now, of all ranks; nothing is written or logged.

        ``.flat()`` gives ``{tag: number}``.
        """
        return self._probe((), inputs)

    def close(self, status: str = "completed") -> None:
        """Stop watching: the hook goes, and the file is closed. Doing so twice does no harm.

        Args:
            status: what ``status.json`` says of the run: completed, failed or interrupted.
        """
        if self._closed:
            return
        self._closed = True
        self._hook.remove()
        self._catcher.unwrap(self.model)
        self._catcher.take()
        if self._folder is not None:
            self._folder.close(self.steps, status)

    # What a probe does

    def _probe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Probe:
        root, collective = unwrapped(self.model), world_size() > 1
        inputs = named_inputs(self.model, args, kwargs)
        if inputs.get("past_key_values") is not None:
            raise UserError(
                f"{type(root).__name__} is called with past_key_values, a cache that a second forward would add to: "
                "train without it, or watch with every_n_steps=0"
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
                seen = self._boundary(inputs, modality_BT.to(device), source, collective)
                capture = Capture(root, rows, seen, Origins(inputs, root))
                with untouched(root, device, alone, self._catcher.autocast), watching(capture):
                    output = root(*args, **kwargs)
                if seen.met:
                    break
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            advice = (
                f"; if the model takes no part of a batch, attach it with sequences={B}" if rows < B else ""
            )
            raise RuntimeError(
                f"a probe runs {type(root).__name__} in evaluation mode on {rows} of {B} sequences, and that failed "
                f"({type(error).__name__}: {error}){advice}"
            ) from error
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            seen.see_stream(capture.stream)
            self._output(seen, output, inputs, root, capture.origins)
            found = seen.finished()
            found.add(
                ["probe_sequences"],
                {"sum": torch.tensor([float(rows)], device=device)},
                lambda raw: (raw["sum"], torch.ones_like(raw["sum"])),
            )
            found = found.merged()
        for path in sorted(capture.crossed - capture.products):
            by_hand = "cross-attention, written out by hand"
            seen.sections.append(Section(path, left_out=by_hand, elsewhere=True))
        calls = [section for section in seen.sections if section.call]
        self.layers = find_layers(
            [section.path for section in calls if section.left_out is None and not section.cross],
            {section.path for section in calls if section.left_out is not None and not section.elsewhere},
            {section.path for section in calls},
            capture.ran, capture.kinds, capture.softmaxes, capture.products,
        )  # fmt: skip
        # No more of it than this: it holds masks of the size of the attention.
        self._sections = seen.sections
        ready = [side for side in seen.sides if side.ready]
        self._tokens_M = torch.cat([selection(*side.tokens, len(side.names)).sum((1, 2)) for side in ready])
        self._names = tuple(name for side in ready for name in side.names)
        return found

    def _modality_and_sources(self, inputs: Inputs) -> tuple[Tensor, list[frozenset[str] | None]]:
        """Modality (B, T), and the inputs that it may describe, the most likely first; None stands for any."""
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

    def _output(self, seen: Boundary, output: Any, inputs: Inputs, root: nn.Module, origins: Origins) -> None:
        """Statistics of the output softmax, where there are logits and the targets' ids are known."""
        if self.modalities.ranges is None or find_ids(inputs) is None:
            return
        least = max(part.stop for parts in self.modalities.ranges.values() for part in parts)
        logits_BTV = find_logits(output, seen.modality_BT.shape, least, root)
        if logits_BTV is None or not seen.ours(origins.of(logits_BTV)):
            return
        seen.output(logits_BTV, targets_of(output, inputs, seen.valid_BT))

    def _probe_and_write(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = find_ids(named_inputs(self.model, args, kwargs))
        self._late = self._anywhere(ids is not None and not ids.numel())
        if self._late:
            return
        first = self._marks is not None
        start = self._clock() if first else 0.0
        found = self._probe(args, kwargs)
        values = found.flat()
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

    def _anywhere(self, own: bool) -> bool:
        """Whether it is so on any rank."""
        if world_size() == 1:
            return own
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        return bool(summed(torch.tensor(float(own), device=device)))

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
