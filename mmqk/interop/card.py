"""The model card (README.md) of an exported run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mmqk.data.config import FOLDER_FIELDS
from mmqk.data.shards.manifest import load_manifest, manifest_hash
from mmqk.data.tokenizers.files import SPECIALS
from mmqk.lab.formatting import markdown_table
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
    run = checkpoint.parent.parent
    run_config = record.get("details", {}).get("config", {})
    fields = yaml.safe_dump(without_roots(run_config), sort_keys=False, allow_unicode=True)
    name = f"mmqk run {record['id']}" if "id" in record else run.resolve().name
    sections = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- mmqk\n---",
        f"# {name}",
        f"`{architecture}` with {n_parameters:,} parameters for tokens of {' and '.join(config.vocab_sizes)}"
        + (f", trained by mmqk to step {step_of(checkpoint):,}." if record else ", exported by mmqk."),
        *_use(architecture, tokenizer),
        *_ids(config, tokenizer),
        *_losses(run, step_of(checkpoint), list(config.vocab_sizes)),
        *_data(run_config.get("data", {}), record.get("identity", {}).get("data", {})),
        *([f"## Configuration\n\n```yaml\n{fields}```"] if run_config else []),
        "## License",
        "No license is set: add `license` to the front matter. The licenses of the training data apply to the parts"
        " of the data that the model reproduces.",
    ]
    return "\n\n".join(sections) + "\n"


def _use(architecture: str, tokenizer: bool) -> list[str]:
    auto = "AutoModelForImageTextToText" if architecture == CHAMELEON else "AutoModelForCausalLM"
    names = f"{auto}, AutoTokenizer" if tokenizer else auto
    lines = [f"from transformers import {names}", "", f'model = {auto}.from_pretrained("PATH")']
    if tokenizer:
        lines += [
            'tokenizer = AutoTokenizer.from_pretrained("PATH")',
            'ids = tokenizer("<bos>a red circle", return_tensors="pt")["input_ids"]',
            "logits = model(ids).logits",
        ]
    note = (
        "The image tokenizer (`vqmodel`) is untrained. The `forward` of the model sets the logits of image ids to the"
        " smallest number: `model.lm_head(model.model(ids).last_hidden_state)` gives all logits."
    )
    return ["## Use", "\n".join(["```python", *lines, "```"]), *([note] if architecture == CHAMELEON else [])]


def _ids(config: ModelConfig, tokenizer: bool) -> list[str]:
    rows, first = [], 0
    for modality, size in config.vocab_sizes.items():
        rows.append([modality, f"{first} to {first + size - 1}"])
        first += size
    special = ", ".join(f"`{name}` {id}" for id, name in enumerate(SPECIALS))
    return [
        "## Ids",
        markdown_table(["modality", "ids"], rows, "---"),
        *([f"Special tokens: {special}."] if tokenizer else []),
    ]


def _losses(run: Path, step: int, modalities: list[str]) -> list[str]:
    """Return the section with the last losses that were logged up to the step of the checkpoint."""
    newest: dict[str, tuple[int, float]] = {}
    for line in read_metrics(run / METRICS_NAME):
        if line["step"] <= step:
            newest |= {name: (line["step"], value) for name, value in line.items()}
    rows = [
        [title, *(f"{newest[key][1]:.4f}" if (key := f"{name}/{m}") in newest else "" for m in modalities)]
        for name, title in _LOSSES.items()
    ]
    shown = [row for row in rows if any(row[1:])]
    text = f"The last losses that were logged up to step {step:,}, in nats per token."
    return ["## Losses", text, markdown_table(["", *modalities], shown, "---")] if shown else []


def _data(data: dict[str, Any], identity: dict[str, Any]) -> list[str]:
    mix = {kind: weight for kind, weight in (data.get("mix") or {}).items() if weight > 0}
    if not mix:
        return []
    rows = []
    for kind, weight in mix.items():
        field = FOLDER_FIELDS.get(kind, "")
        folder, hashed = data.get(field) or "", identity.get(field) or ""
        sources = ", ".join(_sources(Path(folder), hashed)) if folder else ""
        rows.append([kind, f"{weight:g}", f"`{relative(folder)}`" if folder else "", hashed, sources])
    return ["## Data", markdown_table(["kind", "weight", "folder", "hash", "made from"], rows, "---")]


def _sources(folder: Path, hashed: str) -> list[str]:
    """Return the sources that the manifest of a folder lists; empty if the folder has changed since the training."""
    try:
        folder = find_file(folder)
        return list(load_manifest(folder).about.get("sources") or []) if manifest_hash(folder) == hashed else []
    except (UserError, OSError):
        return []
