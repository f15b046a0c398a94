"""Convert folders of Hugging Face models to runs of mmqk and back: `mmqk interop`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmqk.store import DamagedFile, OneSentenceParser, UserError
from mmqk.store import read_run as read_record
from mmqk.store.metrics import parse_vocab_sizes

from .folders import check_empty, read_huggingface, read_run, write_huggingface, write_run
from .names import CHAMELEON, READ, WRITTEN
from .read import adopt
from .tokenizer import tokenizer_files
from .write import architecture_of, build

EPILOG = f"""\
read:    {", ".join(READ)}
written: {", ".join(WRITTEN)}
If a field cannot be represented, the command fails and names the field. Nothing is downloaded.
The text tokenizer of a run is exported with its model; other tokenizers are not converted.

example:
  mmqk interop --from chameleon-7b --to runs/chameleon-7b
  mmqk interop --from runs/mine/<id> --to mine-hf
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
    parser.add_argument(
        "--from", dest="source", type=Path, required=True, help="a folder with config.json, or a run folder"
    )
    parser.add_argument("--to", type=Path, required=True, help="the folder to write")
    parser.add_argument(
        "--vocab-sizes",
        help="number of ids of each modality of a Hugging Face model, in id order: text=65536,image=8192",
    )
    args = parser.parse_args(argv)
    check_empty(args.to)
    if (args.source / "config.json").exists():
        _to_mmqk(args.source, args.to, args.vocab_sizes)
    elif (args.source / "checkpoints").is_dir():
        if args.vocab_sizes is not None:
            raise UserError(
                f"--vocab-sizes is for a Hugging Face folder, but {args.source} is a run: remove it."
            )
        _to_huggingface(args.source, args.to)
    else:
        raise UserError(
            f"{args.source} has neither config.json (Hugging Face) nor checkpoints (a run): give another --from."
        )
    return 0


def _to_mmqk(source: Path, out: Path, vocab_sizes: str | None) -> None:
    sizes = None if vocab_sizes is None else parse_vocab_sizes(vocab_sizes)
    hf_model = read_huggingface(source)
    model = adopt(hf_model, sizes)
    write_run(model, out)
    listed = ", ".join(f"{size:,} {name}" for name, size in model.config.vocab_sizes.items())
    print(f"{out}: {type(hf_model).__name__}; number of ids: {listed}; tokenizers stay in {source}")
    if type(hf_model).__name__ == CHAMELEON:
        print("The image tokenizer (vqmodel) is not converted: the model reads image tokens as ids.")


def _to_huggingface(source: Path, out: Path) -> None:
    from mmqk.training.checkpoint import newest_checkpoint

    from .card import model_card

    newest = newest_checkpoint(source)
    config, weights = read_run(newest)
    model, architecture = build(config, weights), architecture_of(config)
    try:
        record: dict[str, Any] = read_record(source) or {}
    except DamagedFile as damaged:  # export the weights without the record, as for an imported model
        record = {}
        print(f"The model card has no record of the run, because {damaged}.")
    data = (record.get("details", {}).get("config") or {}).get("data", {})
    hashes = record.get("identity", {}).get("data", {})
    tokenizer, about = tokenizer_files(data.get("tokenizers"), hashes.get("tokenizers"))
    parameters = sum({w.data_ptr(): w.numel() for w in weights.values()}.values())  # count tied weights once
    card = model_card(newest, config, architecture, parameters, bool(tokenizer), record)
    write_huggingface(model, out, {**tokenizer, "README.md": card})
    print(f"{out}: {architecture} of {newest}; {about}")
    if architecture == CHAMELEON:
        print(
            "Its image tokenizer (vqmodel) is untrained: copy it from the original, as docs/interop.md shows."
        )
    if config.residual_dropout:
        print(f"model.residual_dropout {config.residual_dropout} is dropped: {architecture} has no residual dropout.")
