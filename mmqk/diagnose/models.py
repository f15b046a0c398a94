"""Checkpoints: `tables_of` is all that ``mmqk diagnose --model`` shows.

With a batch, `probe_with` measures a model, and `first_difference` compares the outputs of two models.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from mmqk.checkpoint import load_checkpoint, model_of, newest_checkpoint
from mmqk.diagnose.tensors import call, read
from mmqk.diagnose.weights import CAVEAT, LAWS, Description, grew, ranges_of
from mmqk.interop.folders import read_huggingface
from mmqk.model import EarlyFusionTransformer
from mmqk.model.transformer import evaluation_mode
from mmqk.monitors import attach
from mmqk.monitors.adapters import clean, tensors_in
from mmqk.store import UserError
from mmqk.store.errors import reason_of

Batch = dict[str, Tensor]  # model inputs by name
Blocks = Mapping[str, range]


def read_batch(path: Path) -> Batch:
    """Return the model inputs in a file: token ids (B, T) or (T,), or a dict of arrays by the names of the inputs.

    Args:
        path: a file of torch.save (.pt), numpy (.npz or .npy) or JSON. Ids without a name are called input_ids.

    Raises:
        UserError: the file cannot be read without executing code, or its rows have different lengths.
    """
    try:
        if path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix in (".npz", ".npy"):
            content = np.load(path, allow_pickle=False)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
        named = dict(content) if hasattr(content, "keys") else {"input_ids": content}
        batch = {str(name): torch.as_tensor(value) for name, value in named.items()}
    except Exception as error:  # numpy, pickle and JSON raise different errors
        advice = "give token ids in rows of equal length"
        raise UserError(f"{path} is not a batch ({reason_of(error)}): {advice}.") from error
    return {name: x[None] if x.ndim == 1 else x for name, x in batch.items()}


def load(source: str | Path) -> nn.Module:
    """Return the model of a checkpoint or run of mmqk, of a Hugging Face folder, or of ``module:function``, in fp32
    and on the CPU.

    Raises:
        UserError: the source has no model that can be built, or its files are damaged.
    """
    path = Path(source)
    if not path.exists() and ":" in str(source):
        model = call(str(source))
        if not isinstance(model, nn.Module):
            raise UserError(f"{source} returned a {type(model).__name__}: return the model, with its weights.")
    elif (path / "config.json").exists():
        model = read_huggingface(path, None)
    elif path.suffix == ".ckpt" or (path / "checkpoints").is_dir():
        model = model_of(load_checkpoint(newest_checkpoint(path) if path.is_dir() else path))
    else:
        raise UserError(
            f"{source} has weights but no model: give module:function, a function of yours that builds the model and"
            " loads them."
        )
    _convert(model, torch.float32)
    return model.eval()


def _convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the parameters, one at a time. Buffers, such as the frequencies of RoPE, stay."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def inputs_of(model: nn.Module, batch: Batch) -> Batch:
    """Return the batch with the ids under the name that the model gives its first input.

    Raises:
        UserError: an id is outside the vocabulary.
    """
    names = list(inspect.signature(model.forward).parameters)
    inputs = {names[0] if name == "input_ids" and name not in names else name: x for name, x in batch.items()}
    embedding = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    ids = inputs.get("input_ids", inputs.get(names[0]))
    if embedding is not None and ids is not None and not ids.is_floating_point():
        size = embedding.num_embeddings
        if ids.min() < 0 or ids.max() >= size:
            raise UserError(f"The batch has the id {int(ids.max())}, but the model has {size} ids: give its own batch.")
    return inputs


def probe_with(source: str | Path, batch: Batch, modality: Blocks | None = None) -> dict[str, float]:
    """Return the statistics of docs/statistics.md that one forward pass measures, by tag.

    Args:
        source: as in `load`.
        batch: the inputs; all sequences are used.
        modality: id ranges by modality; other ids are text. By default those of an mmqk checkpoint, or those that the
            configuration of the model names.

    Raises:
        UserError: the model cannot be built, or cannot read this batch.
    """
    model = load(source)
    if modality is None and isinstance(model, EarlyFusionTransformer):
        modality = ranges_of(model.config.vocab_sizes)
    watch = attach(model, modality=modality, every_n_steps=0, sequences=len(next(iter(batch.values()))), matrices=True)
    try:
        return watch.probe(**inputs_of(model, batch)).flat()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{source} cannot read the batch ({reason_of(error)}): give its own batch.") from error
    finally:
        watch.close()


def first_difference(a: str | Path, b: str | Path, batch: Batch) -> pd.DataFrame:
    """Return how much the outputs of each module differ between two checkpoints of one model.

    The difference of two outputs is |x - y| / |x| over all elements, and rounding, the difference between fp32 and
    bf16 parameters of ``a``, is the yardstick. Both models run on the CPU, where equal weights give equal bits.

    Args:
        a, b: as in `load`; one model is in memory at a time, with the outputs of ``a`` in both precisions.
        batch: the inputs.

    Returns:
        A row per module that runs in both, in the order in which the modules finish: module, fp32, bf16, rounding,
        and ratio = fp32 / rounding. The first row with fp32 > 0 is the first module whose output differs; no such row
        means that the models are equal on this batch. From the first row with a ratio above 1 on, the difference is
        larger than that of rounding.

    Raises:
        UserError: the models have no module in common, or cannot read the batch.
    """
    a_fp32, a_bf16 = _outputs(a, batch)
    b_fp32, b_bf16 = _outputs(b, batch)
    names = [name for name, x in a_fp32.items() if name in b_fp32 and b_fp32[name].shape == x.shape]
    if not names:
        raise UserError(f"{a} and {b} have no module with outputs of one shape: give two checkpoints of one model.")
    pairs = {"fp32": (a_fp32, b_fp32), "bf16": (a_bf16, b_bf16), "rounding": (a_fp32, a_bf16)}
    columns = {title: [_difference(x[name], y[name]) for name in names] for title, (x, y) in pairs.items()}
    table = pd.DataFrame({"module": names, **columns})
    return table.assign(ratio=table.fp32 / table.rounding.where(table.rounding > 0))


def _difference(x: Tensor, y: Tensor) -> float:
    if torch.equal(x, y):
        return 0.0
    size = float(x.double().norm())
    return float((x.double() - y.double()).norm()) / size if size else float("inf")


@torch.no_grad()
def _outputs(source: str | Path, batch: Batch) -> list[dict[str, Tensor]]:
    """Return the first output of each module, with parameters in fp32 and in bf16, in the order of execution."""
    model = load(source)
    inputs = inputs_of(model, batch)
    both: list[dict[str, Tensor]] = []
    for dtype in (torch.float32, torch.bfloat16):
        _convert(model, dtype)
        outputs: dict[str, Tensor] = {}

        def store(path: str, outputs: dict[str, Tensor], _: nn.Module, __: Any, output: Any) -> None:
            output = dict(output) if isinstance(output, Mapping) else output
            found = next((x for x in tensors_in(output) if x.is_floating_point()), None)
            if found is not None:
                outputs.setdefault(clean(path) or "the model", found.clone())

        typed = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
        with ExitStack() as stack:
            stack.enter_context(evaluation_mode(model))
            for path, module in model.named_modules():
                stack.callback(module.register_forward_hook(partial(store, path, outputs)).remove)
            try:
                model(**typed)
            except Exception as error:
                raise UserError(f"{source} cannot read the batch ({reason_of(error)}): give its own batch.") from error
        both.append(outputs)
    return both


def blocks_of(texts: Sequence[str]) -> dict[str, range]:
    """Return the id ranges of ``--modality image=4:8196``.

    Raises:
        UserError: a text has another form.
    """
    blocks = {}
    for text in texts:
        name, _, ends = text.partition("=")
        first, _, end = ends.partition(":")
        if not (name.isidentifier() and first.isdigit() and end.isdigit() and int(first) < int(end)):
            raise UserError(f"--modality {text} is not NAME=FIRST:END: give its ids, as in --modality image=4:8196.")
        blocks[name] = range(int(first), int(end))
    return blocks


def tables_of(
    sources: Sequence[str | Path], batch: Batch | None = None, blocks: Blocks | None = None, limit: float = 1000.0
) -> tuple[dict[str, pd.DataFrame], list[str], bool]:
    """Return what checkpoints of one run, the oldest first, say.

    Args:
        sources: as in `mmqk.diagnose.tensors.read`.
        batch: inputs for a probe of each checkpoint.
        blocks: as in `probe_with`.
        limit: a limit of the attention logits.

    Returns:
        The tables by their titles; sentences on what could not be read and on what the tables cannot say; and whether
        there is a finding: a fault, a measured logit beyond the limit, or logits or their bound that grow by a law.
    """
    checkpoints = [read(source) for source in sources]
    found = [Description(weights, blocks) for weights in checkpoints]
    last, numbers = found[-1], [description.numbers() for description in found]
    notes = list(dict.fromkeys(note for description in found for note in description.notes))
    tables = {"tensors with a fault": last.faults, "layers": last.layers}
    tables["largest logits that the weights allow, by head"] = last.heads.sort_values("attn_logit_bound")[::-1]
    tables |= {"gains of norms": last.gains, "norms of rows by vocabulary block": last.rows}
    if checkpoints[-1].format != "mmqk checkpoint" and "none" in set(last.layers.qk_norm):
        notes.append("A QK-Norm without gains has no weights: with one, the bounds are too large.")
    if batch is not None:
        probes = [probe_with(source, batch, blocks or None) for source in sources]
        numbers = [{**a, **b} for a, b in zip(numbers, probes, strict=True)]
        tables["probe"] = pd.DataFrame(probes[-1].items(), columns=["tag", "value"])
    is_logit = ("attn_logit_bound", "attn_logit_absmax")
    is_finding = bool(len(last.faults)) or any(
        abs(value) > limit for name, value in numbers[-1].items() if name.startswith("attn_logit_absmax")
    )
    steps = [weights.step for weights in checkpoints if weights.step is not None]
    if len(steps) < len(sources) > 1:
        steps = list(range(len(sources)))
        notes.append("The steps of the checkpoints are not known: they are counted 0, 1, 2, ...")
    if not all(a < b for a, b in itertools.pairwise(steps)):
        notes.append("The steps of the checkpoints do not rise, so that no growth is computed: give the earlier first.")
    elif len(sources) > 1:
        growth = grew(pd.DataFrame(numbers, index=steps), limit).rename_axis("tag").reset_index()
        tables["growth"] = growth.sort_values("ratio", ascending=False)
        is_finding |= bool((growth.tag.str.startswith(is_logit) & growth.law.isin(list(LAWS))).any())
        notes.append(CAVEAT)
    if batch is not None and len(sources) == 2:
        tables["outputs of modules that differ"] = first_difference(sources[0], sources[1], batch).query("fp32 > 0")
    return tables, notes, is_finding
