"""`attach`: watch a model that mmqk did not build."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mmqk.monitors.adapters import Adapter, adapter_for
from mmqk.monitors.attached.boundary import Boundary, find_logits
from mmqk.monitors.attached.capture import Capture, watching
from mmqk.monitors.attached.inputs import (
    Catcher,
    Inputs,
    Modalities,
    Modality,
    find_ids,
    first_rows,
    named_inputs,
    sequences_of,
    tensors,
    valid_of,
)
from mmqk.monitors.attached.introduce import introduction, is_first_rank, warn_of_absent
from mmqk.monitors.attached.isolate import parameters_of_one_dtype, untouched, unwrapped
from mmqk.monitors.attached.layers import Layers, find_layers
from mmqk.monitors.ranks import world_size
from mmqk.monitors.record import Probe
from mmqk.store.errors import UserError
from mmqk.store.files import write_json
from mmqk.store.folder import STATUS_NAME
from mmqk.store.metrics import MetricsWriter, last_metrics

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

    Raises:
        UserError: ranges or names that cannot be, a count below its least.
    """
    if every_n_steps < 0:
        raise UserError(f"every_n_steps is {every_n_steps}: give 0 for no probes, or more")
    if sequences < 1:
        raise UserError(f"sequences is {sequences}: a probe needs at least 1")
    return Watch(
        model,
        Modalities(modality, names),
        every_n_steps,
        sequences,
        None if out is None else Path(out),
        log,
        adapter or adapter_for(model),
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
    steps: int = 0
    layers: Layers | None = None
    _catcher: Catcher = field(default_factory=Catcher)
    _writer: MetricsWriter | None = None
    _marks: list[float] | None = field(default_factory=list)
    _closed: bool = False
    _last: Boundary | None = None

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
            self._started = self.steps if number is None else number - 1
            self._open()
        self.steps = self.steps + 1 if number is None else number
        if self._marks is not None:
            self._marks.append(time.perf_counter())
        called = self._catcher.take()
        if not self._due():
            return
        if called is None:
            raise UserError(
                f"the watched {type(self.model).__name__} was not called before step {self.steps}: attach the object "
                "that the training loop calls (what torch.compile or DistributedDataParallel returned), and do so "
                "before its first call"
            )
        self._probe_and_write(*called)

    def _due(self) -> bool:
        every, done = self.every_n_steps, self.steps - self._started
        return bool(every) and (
            self.steps % every == 0 or (self._marks is not None and done == min(FIRST, every))
        )

    def probe(self, **inputs: Any) -> Probe:
        """Statistics of a forward with these inputs now, of all ranks; nothing is written or logged.

        ``.flat()`` gives ``{tag: number}``.
        """
        return self._probe((), inputs)

    def close(self) -> None:
        """Stop watching: the hook goes, and the file is closed. Doing so twice does no harm."""
        if self._closed:
            return
        self._closed = True
        self._hook.remove()
        self._catcher.unwrap(self.model)
        self._catcher.take()
        if self._writer is not None:
            self._writer.close()
            self._status("completed")

    # What a probe does

    def _probe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Probe:
        root, collective = unwrapped(self.model), world_size() > 1
        B = sequences_of(named_inputs(self.model, args, kwargs))
        rows = min(B, self.sequences)
        weight = next((p for p in root.parameters() if p.is_floating_point()), None)
        device = torch.device("cpu") if weight is None else weight.device
        alone = parameters_of_one_dtype(root)
        single = weight is not None and alone and weight.dtype == torch.float32
        args, kwargs = first_rows((args, kwargs), B, rows, torch.float32 if single else None)
        inputs = named_inputs(self.model, args, kwargs)
        with torch.no_grad():
            modality_BT = self.modalities.of(inputs).to(device)
            valid_BT = valid_of(inputs, modality_BT).to(device)
        seen = Boundary(self.modalities, modality_BT, valid_BT, self.adapter, collective)
        capture = Capture(root, rows, seen.see_call, seen.see_module)
        try:
            with untouched(root, device, full_precision=alone), watching(capture):
                output = root(*args, **kwargs)
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise RuntimeError(
                f"a probe runs {type(root).__name__} on the first {rows} of {B} sequences, and that failed; "
                f"if the model takes no part of a batch, attach it with sequences={max(B, rows)}"
            ) from error
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            self._output(seen, output, inputs, root)
            found = seen.finished()
            found.add(
                ["probe_sequences"],
                {"sum": torch.tensor([float(rows)], device=device)},
                lambda raw: (raw["sum"], torch.ones_like(raw["sum"])),
            )
            found = found.merged()
        told = [s.path for s in seen.sections if s.call]
        measured = [s.path for s in seen.sections if s.call and s.left_out is None]
        self.layers = find_layers(measured, told, capture.ran, capture.kinds, capture.softmaxes)
        self._last = seen
        return found

    def _output(self, seen: Boundary, output: Any, inputs: Inputs, root: nn.Module) -> None:
        """Statistics of the output softmax, where there are logits and the targets' ids are known."""
        if self.modalities.ranges is None or find_ids(inputs) is None:
            return
        least = max(part.stop for parts in self.modalities.ranges.values() for part in parts)
        logits_BTV = find_logits(output, seen.modality_BT.shape, least, root)
        if logits_BTV is None:
            return
        target_mask_BT = seen.valid_BT & seen.valid_BT.roll(-1, 1)
        if type(output).__module__.partition(".")[0] == "transformers":
            labels = next(
                (x for name, x in tensors(inputs) if name == "labels" and x.shape == target_mask_BT.shape),
                None,
            )
            if labels is not None:
                target_mask_BT = target_mask_BT & (labels.roll(-1, 1) != -100)
        target_mask_BT[:, -1] = False
        seen.output(logits_BTV, target_mask_BT)

    def _probe_and_write(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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
            self._introduce(self._clock() - start)
            self._marks = None
        if not is_first_rank():
            return
        if self._writer is not None:
            self._writer.write(self.steps, values)
            self._writer.flush()
            self._status("running")
        if self.log is not None:
            self.log(values, step=self.steps)

    def _clock(self) -> float:
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        return time.perf_counter()

    # What it says and writes

    def _introduce(self, seconds: float) -> None:
        assert self._last is not None and self.layers is not None and self._marks is not None
        tokens_M = self.modalities.tokens(self._last.modality_BT, self._last.valid_BT)
        if self._last.collective:
            dist.all_reduce(tokens_M)
        if is_first_rank():
            tokens = dict(zip(self.modalities.names, tokens_M.tolist(), strict=True))
            gaps = [after - before for before, after in itertools.pairwise(self._marks)]
            print(
                introduction(self.layers, tokens, self._last.sections, seconds, gaps, self.every_n_steps),
                flush=True,
            )
            warn_of_absent(tokens)

    def _open(self) -> None:
        """The file, at the first step; a run that resumes leaves out what came later."""
        if self.out is None or not self.every_n_steps or not is_first_rank():
            return
        path = self.out / "metrics.jsonl"
        last = last_metrics(path).get("step")
        if last is not None and not self._started:
            raise UserError(
                f"{path} holds a run up to step {last}: give another folder, or set watch.steps to the step that "
                "this one resumes from"
            )
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            self._writer = MetricsWriter(path)
        except OSError as error:
            raise UserError(f"{self.out} cannot be written ({error}): give another folder") from error
        self._writer.truncate_after(self._started)
        self._status("running")

    def _status(self, status: str) -> None:
        assert self.out is not None
        write_json(self.out / STATUS_NAME, {"status": status, "step": self.steps})
