"""The model card (README.md) of an exported run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mmqk.data.config import FOLDER_FIELDS
from mmqk.data.shards.manifest import load_manifest, manifest_hash
from mmqk.data.tokenizers.files import SPECIALS
from mmqk.lab.formatting import markdown_table, render
from mmqk.model import ModelConfig
from mmqk.store import UserError, find_file, read_metrics, relative, without_roots
from mmqk.store.checkpoint_files import step_of
from mmqk.store.metrics import METRICS_NAME

from .read import CHAMELEON

_LOSSES = {
    "loss": "training loss",
    "val_loss": "validation loss",
    "val_unigram": "unigram loss",
    "val_excess": "excess validation loss",
}


def model_card(
    checkpoint: Path,
    config: ModelConfig,
    architecture: str,
    n_parameters: int,
    tokenizer: bool,
    record: Mapping[str, Any],
) -> str:
    """Return the card of a model as Markdown for the Hugging Face hub.

    It has sections on use, ids, losses, data, configuration and license, and no times or absolute paths.

    Args:
        checkpoint: the exported checkpoint, in the folder ``checkpoints`` of its run.
        config: configuration of the model.
        architecture: class of the model in transformers.
        n_parameters: number of parameters of the model.
        tokenizer: whether the text tokenizer is exported too.
        record: run.json of the run; may be empty.
    """
    run, step = checkpoint.parent.parent, step_of(checkpoint)
    run_config = record.get("details", {}).get("config", {})
    ends = [*itertools.accumulate(config.vocab_sizes.values())]
    blocks = zip(config.vocab_sizes.items(), ends, strict=True)
    fields = yaml.safe_dump(without_roots(run_config), sort_keys=False, allow_unicode=True).strip()
    content = {
        "name": f"mmqk run {record['id']}" if "id" in record else run.resolve().name,
        "architecture": architecture,
        "is_chameleon": architecture == CHAMELEON,
        "auto": "AutoModelForImageTextToText" if architecture == CHAMELEON else "AutoModelForCausalLM",
        "parameters": f"{n_parameters:,}",
        "modalities": " and ".join(config.vocab_sizes),
        "is_trained": bool(record),
        "step": f"{step:,}",
        "tokenizer": tokenizer,
        "ids": _table(["modality", "ids"], [[name, f"{end - size} to {end - 1}"] for (name, size), end in blocks]),
        "specials": ", ".join(f"`{name}` {id}" for id, name in enumerate(SPECIALS)),
        "losses": _losses(run, step, list(config.vocab_sizes)),
        "data": _data(run_config.get("data", {}), record.get("identity", {}).get("data", {})),
        "fields": fields if run_config else "",
    }
    return render("card.md", content, Path(__file__).with_name("templates"))


def _table(heads: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown; empty without rows."""
    return markdown_table(heads, rows, "---") if rows else ""


def _losses(run: Path, step: int, modalities: list[str]) -> str:
    """Return the table of the last losses that were logged up to the step of the checkpoint."""
    newest: dict[str, float] = {}
    for line in read_metrics(run / METRICS_NAME):
        newest |= line if line["step"] <= step else {}
    rows = [
        [title, *(f"{newest[key]:.4f}" if (key := f"{name}/{m}") in newest else "" for m in modalities)]
        for name, title in _LOSSES.items()
    ]
    return _table(["", *modalities], [row for row in rows if any(row[1:])])


def _data(data: dict[str, Any], identity: dict[str, Any]) -> str:
    """Return the table of the kinds of training data."""
    rows = []
    for kind, weight in (data.get("mix") or {}).items():
        if weight > 0:
            field = FOLDER_FIELDS.get(kind, "")
            folder, hashed = data.get(field) or "", identity.get(field) or ""
            sources = ", ".join(_sources(Path(folder), hashed)) if folder else ""
            rows.append([kind, f"{weight:g}", f"`{relative(folder)}`" if folder else "", hashed, sources])
    return _table(["kind", "weight", "folder", "hash", "made from"], rows)


def _sources(folder: Path, hashed: str) -> list[str]:
    """Return the sources that the manifest of a folder lists; empty if the folder has changed since the training."""
    try:
        folder = find_file(folder)
        return list(load_manifest(folder).about.get("sources") or []) if manifest_hash(folder) == hashed else []
    except (UserError, OSError):
        return []
