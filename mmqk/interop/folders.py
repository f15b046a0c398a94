"""Convert folders of Hugging Face models to runs of mmqk and back: ``mmqk interop``. Only local files are read.

An exported run has its model, its text tokenizer for transformers' AutoTokenizer, and a model card (README.md).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from safetensors import SafetensorError, safe_open

from mmqk.checkpoint import PREFIX, load_checkpoint, model_of, newest_checkpoint, save_checkpoint
from mmqk.data.config import FOLDER_FIELDS
from mmqk.data.shards.manifest import load_manifest, manifest_hash
from mmqk.data.tokenizers.files import BOS, EOS, PAD, SPECIALS, TextTokenizer, tokenizers_hash
from mmqk.data.tokens.ids import parse_vocab_sizes
from mmqk.lab.formatting import markdown_table, render
from mmqk.model import EarlyFusionTransformer, ModelConfig
from mmqk.store import OneSentenceParser, UserError, read_metrics, read_run, relative, without_roots
from mmqk.store.checkpoint_files import step_of
from mmqk.store.errors import named_value, reason_of
from mmqk.store.files import DamagedFile, check_empty, find_file, new_folder, read_json
from mmqk.store.formatting import plain
from mmqk.store.metrics import METRICS_NAME

from .read import CHAMELEON, IMAGE_TOKENIZER, READ, WRITTEN, adopt
from .write import architecture_of, build, import_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHECKPOINT = "checkpoints/step00000000.ckpt"
_LOSSES = {
    "loss": "training loss", "val_loss": "validation loss", "val_unigram": "unigram loss",
    "val_excess": "excess validation loss",
}  # fmt: skip
EPILOG = f"""\
read:    {", ".join(READ)}
written: {", ".join(WRITTEN)}
If a field cannot be represented, the command fails and names the field. Nothing is downloaded.
The text tokenizer of a run is exported with its model; other tokenizers are not converted.

example:
  mmqk interop --from chameleon-7b --to runs/chameleon-7b
  mmqk interop --from runs/mine/<id> --to mine-hf
  mmqk interop --from path/to/llama --to changed --set model.qk_norm.kind=rms --batch ids.npy
"""


def main(argv: list[str] | None = None) -> int:
    """Convert one folder; its content decides the direction.

    Raises:
        UserError: the source cannot be read, the model cannot be represented, or the target is not empty.
    """
    parser = OneSentenceParser(
        prog="mmqk interop",
        description="Convert weights and configuration of a Hugging Face model to mmqk, or of a run to Hugging Face.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("--from", dest="source", type=Path, required=True, help="a folder with config.json, or a run folder")
    add("--to", type=Path, required=True, help="the folder to write")
    text = "number of ids of each modality of a Hugging Face model, in id order: text=65536,image=8192"
    add("--vocab-sizes", help=text)
    text = "change the architecture and keep the function near, as in a fork; repeatable"
    add("--set", type=named_value, action="append", default=[], metavar="model.FIELD=VALUE", help=text)
    text = "for --set: .npy of ids (sequences, tokens) for the fit of new gains (default: the run's own data)"
    add("--batch", type=Path, help=text)
    args = parser.parse_args(argv)
    check_empty(args.to, "--to")
    if args.batch is not None and not args.set:
        raise UserError("--batch is for a change of the architecture: give --set too, or remove it.")
    sizes = None if args.vocab_sizes is None else parse_vocab_sizes(args.vocab_sizes)
    is_huggingface = (args.source / "config.json").exists()
    if not is_huggingface and not (args.source / "checkpoints").is_dir():
        raise UserError(
            f"{args.source} has neither config.json (Hugging Face) nor checkpoints (a run): give another --from."
        )
    if sizes is not None and not is_huggingface:
        raise UserError(f"--vocab-sizes is for a Hugging Face folder, but {args.source} is a run: remove it.")
    if args.set:
        _changed(args.source, args.to, sizes, args.set, args.batch)
    elif is_huggingface:
        _to_mmqk(args.source, args.to, sizes)
    else:
        _to_huggingface(args.source, args.to)
    return 0


def _to_mmqk(source: Path, out: Path, sizes: dict[str, int] | None) -> None:
    hf_model = read_huggingface(source)
    model = adopt(hf_model, sizes)
    write_run(model, out)
    listed = ", ".join(f"{size:,} {name}" for name, size in model.config.vocab_sizes.items())
    print(f"{out}: {type(hf_model).__name__}; number of ids: {listed}; tokenizers stay in {source}")
    if type(hf_model).__name__ == CHAMELEON:
        print("The image tokenizer (vqmodel) is not converted: the model reads image tokens as ids.")


def _changed(
    source: Path, out: Path, sizes: dict[str, int] | None, given: list[tuple[str, str]], file: Path | None
) -> None:
    """Write a model with another architecture, as a Hugging Face folder if a class can hold it."""
    from .surgery import batch_for, fields_of, operate

    fields = fields_of(given)
    if (source / "config.json").exists():
        model = adopt(read_huggingface(source), sizes)
        dtype = model.embed.weight.dtype
    else:
        saved = load_checkpoint(newest_checkpoint(source), "give another --from")
        model, dtype = model_of(saved), saved["state_dict"][f"{PREFIX}embed.weight"].dtype
    batch, origin = batch_for(model.config, source, file)
    new, _, change = operate(model.float(), fields, batch)
    print(f"on {len(batch.ids_BT)} {origin}\nlogits differ by {plain(change.logits, 2)} of their RMS")
    for name, (before, after) in change.loss.items():
        print(f"loss {name} {before:.4f} -> {after:.4f}")
    new = new.to(dtype)
    try:
        architecture = architecture_of(new.config)
    except UserError as error:
        write_run(new, out)
        print(f"{out}: a checkpoint of mmqk, because {str(error).rstrip('.')}; tokenizers stay in {source}")
        return
    write_huggingface(build(new.config, new.state_dict()), out)
    print(f"{out}: {architecture}; tokenizers stay in {source}")


def _to_huggingface(source: Path, out: Path) -> None:
    newest = newest_checkpoint(source)
    content = load_checkpoint(newest, "give another --from")
    config = ModelConfig.from_dict(content["mmqk_model"])
    weights = {name.removeprefix(PREFIX): tensor for name, tensor in content["state_dict"].items()}
    model = build(config, weights)
    architecture = type(model).__name__
    try:
        record: dict[str, Any] = read_run(source) or {}
    except DamagedFile as damaged:  # export the weights without the record, as for an imported model
        record = {}
        print(f"The model card has no record of the run, because {damaged}.")
    run_config, hashes = record.get("details", {}).get("config", {}), record.get("identity", {}).get("data", {})
    data, step, names = run_config.get("data", {}), step_of(newest), list(config.vocab_sizes)
    tokenizer, about = tokenizer_files(data.get("tokenizers"), hashes.get("tokenizers"))
    parameters = sum({w.data_ptr(): w.numel() for w in weights.values()}.values())  # count tied weights once
    ends = itertools.accumulate(config.vocab_sizes.values())
    ids = [[name, f"{end - config.vocab_sizes[name]} to {end - 1}"] for name, end in zip(names, ends, strict=True)]
    fields = yaml.safe_dump(without_roots(run_config), sort_keys=False, allow_unicode=True).strip()
    content = {
        "name": f"mmqk run {record['id']}" if "id" in record else newest.parent.parent.resolve().name,
        "architecture": architecture,
        "is_chameleon": architecture == CHAMELEON,
        "auto": "AutoModelForImageTextToText" if architecture == CHAMELEON else "AutoModelForCausalLM",
        "parameters": f"{parameters:,}",
        "modalities": " and ".join(names),
        "is_trained": bool(record),
        "step": f"{step:,}",
        "tokenizer": bool(tokenizer),
        "ids": _table(["modality", "ids"], ids),
        "specials": ", ".join(f"`{name}` {id}" for id, name in enumerate(SPECIALS)),
        "losses": _losses(newest.parent.parent, step, names),
        "data": _data(data, hashes),
        "fields": fields if run_config else "",
    }
    card = render("card.md", content, Path(__file__).with_name("templates"))
    write_huggingface(model, out, {**tokenizer, "README.md": card})
    print(f"{out}: {architecture} of {newest}; {about}")
    if architecture == CHAMELEON:
        print("Its image tokenizer (vqmodel) is untrained: copy it from the original, as docs/interop.md shows.")
    if config.residual_dropout:
        print(f"model.residual_dropout {config.residual_dropout} is dropped: {architecture} has no residual dropout.")


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


def _data(data: dict[str, Any], hashes: dict[str, Any]) -> str:
    """Return the table of the kinds of training data, with the sources that the manifest of each folder lists, unless
    the folder has changed since the training."""
    rows = []
    for kind, weight in (data.get("mix") or {}).items():
        if weight > 0:
            field, sources = FOLDER_FIELDS.get(kind, ""), list[str]()
            folder, hashed = data.get(field) or "", hashes.get(field) or ""
            with contextlib.suppress(UserError, OSError):
                if folder and manifest_hash(found := find_file(folder)) == hashed:
                    sources = load_manifest(found).about.get("sources") or []
            rows.append([kind, f"{weight:g}", f"`{relative(folder)}`" if folder else "", hashed, ", ".join(sources)])
    return _table(["kind", "weight", "folder", "hash", "made from"], rows)


def read_huggingface(folder: Path, known: Collection[str] | None = READ) -> PreTrainedModel:
    """Return the model that `save_pretrained` wrote to a folder, in the widest dtype of its weights.

    Args:
        folder: the folder.
        known: the architectures to accept; None for all models of transformers.

    Raises:
        UserError: the architecture is unknown, files are damaged or missing, or transformers is not installed.
    """
    config = read_json(folder / "config.json", "download the model again.") or {}
    name = str((config.get("architectures") or ["none"])[0])
    if known is not None and name not in known:
        raise UserError(f"{folder} has the architecture {name}: mmqk reads {', '.join(known)}.")
    transformers = import_transformers()
    kind: Any = getattr(transformers, name, None)
    if not hasattr(kind, "config_class"):
        raise UserError(f"{folder} has the architecture {name}, which this version of transformers does not have.")
    needed = kind.config_class.model_type
    if (stated := config.get("model_type", needed)) != needed:
        file = folder / "config.json"
        raise UserError(f"{file} has the architecture {name} but the model_type {stated}, not {needed}: correct one.")
    if (folder / "adapter_config.json").exists():
        raise UserError(f"{folder} has an adapter (adapter_config.json): merge it into the weights first.")
    try:
        with _quiet(transformers):
            model, info = kind.from_pretrained(
                str(folder), local_files_only=True, dtype=_widest_dtype(folder), output_loading_info=True,
                ignore_mismatched_sizes=True,
            )  # fmt: skip
    except Exception as error:  # transformers, safetensors and pickle raise different errors
        raise UserError(
            f"{folder} cannot be loaded ({reason_of(error)}): check that its files are complete."
        ) from error
    # transformers fills missing weights and weights of another shape with random numbers, and drops unknown weights.
    missing = sorted(name for name in info["missing_keys"] if not name.startswith(IMAGE_TOKENIZER))
    if missing:
        raise UserError(f"{folder} has no weights for {missing[0]}: check that its files are complete.")
    if info["mismatched_keys"]:
        weight, stored, expected = sorted(info["mismatched_keys"])[0]
        raise UserError(
            f"{folder} has {weight} of shape {tuple(stored)}, but config.json needs {tuple(expected)}: the files belong"
            " to two models."
        )
    if unknown := sorted(info["unexpected_keys"]):
        raise UserError(f"{folder} has weights {unknown[0]}, which {name} does not have.")
    return model.eval()


def _widest_dtype(folder: Path) -> torch.dtype | str:
    """Return the dtype that can hold all weights of the safetensors files; "auto", the dtype in config.json, for
    other files."""
    floats = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 (not a mapping)
    dtypes = [floats[name] for name in found if name in floats]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else "auto"


def write_run(model: EarlyFusionTransformer, out: Path) -> None:
    """Write a folder that `mmqk.checkpoint.load_model` can read.

    Raises:
        UserError: `out` is not empty or cannot be written.
    """
    weights = {PREFIX + name: tensor for name, tensor in model.state_dict().items()}
    with _publishing(out) as folder:
        save_checkpoint({"mmqk_model": asdict(model.config), "state_dict": weights}, folder / CHECKPOINT)


def write_huggingface(model: PreTrainedModel, out: Path, files: Mapping[str, str] | None = None) -> None:
    """Write a folder that `from_pretrained` can read. ``files`` maps the names of further files to their text.

    Raises:
        UserError: `out` is not empty or cannot be written.
    """
    with _publishing(out) as folder:
        with _quiet(import_transformers()):
            model.save_pretrained(folder)
        for name, text in (files or {}).items():
            (folder / name).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _publishing(out: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `out` that is renamed to `out` at the end of the ``with`` block."""
    check_empty(out, "--to")
    try:
        with new_folder(out) as folder:
            yield folder
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk may raise any of them
        raise UserError(f"{out} cannot be written ({reason_of(error)}): give another --to.") from error


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Disable the log and progress bars of transformers; the caller reports errors as a UserError."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(log.CRITICAL)
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def tokenizer_files(folder: str | None, recorded: str | None) -> tuple[dict[str, str], str]:
    """Return the contents of tokenizer.json and tokenizer_config.json by file name, and a sentence about the files.

    If the tokenizer of the run is not available, there are no files and the sentence gives the reason. The ids are
    those of the joint vocabulary: first the special tokens, then the text entries. The files have no entries for
    image codes, which have no text.

    Args:
        folder: ``data.tokenizers`` in the configuration of the run.
        recorded: hash of the tokenizers in the identity of the run.
    """
    if not folder or not recorded:
        return {}, "no tokenizer is included, because run.json names none"
    try:
        present = tokenizers_hash(find_file(folder))
    except UserError:  # a file is missing
        present = ""
    if present != recorded:
        return {}, f"no tokenizer is included, because {folder} does not have the tokenizers of the run ({recorded})"
    content = json.loads(TextTokenizer.load(find_file(folder)).to_json())
    vocabulary = content["model"]["vocab"]
    shifted = {text: id + len(SPECIALS) for text, id in vocabulary.items()}
    content["model"]["vocab"] = {text: id for id, text in enumerate(SPECIALS)} | shifted
    content["added_tokens"] = [
        {"id": id, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for id, text in enumerate(SPECIALS)
    ]  # fmt: skip
    content["post_processor"] = None
    names = {"bos_token": SPECIALS[BOS], "eos_token": SPECIALS[EOS], "pad_token": SPECIALS[PAD]}
    loader = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    files = {"tokenizer.json": content, "tokenizer_config.json": loader | names}
    texts = {name: json.dumps(value, indent=1, ensure_ascii=False) + "\n" for name, value in files.items()}
    return texts, "tokenizer.json has the text tokenizer; images are ids of the image tokenizer"
