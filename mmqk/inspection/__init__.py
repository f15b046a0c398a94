"""Show the training data of a run: ``mmqk inspect --config configs/demo.yaml``."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mmqk.store import OneSentenceParser, differing_fields, read_run, relative_word, with_configs, write_folder
from mmqk.store.errors import UserError
from mmqk.store.files import writing

if TYPE_CHECKING:
    from mmqk.config import RunConfig

DESCRIPTION = """\
Show the training data of a configuration and seed: its first sequences with text, images, modalities, targets and
documents, and statistics of the tokens. Takes every flag of mmqk.train. With --step, show the sequences of one
optimizer step: their numbers, shards and keys, and their losses by modality."""

EPILOG = """\
files in --out:
  index.html        the page, in one file without external resources
  statistics.json   the numbers of the page (with --step: step.json)

examples:
  mmqk inspect --config configs/demo.yaml
  mmqk inspect --config configs/demo.yaml --data.pack documents --seed 1
  mmqk inspect --config configs/demo.yaml --data.mix '{"dial": 1}'
  mmqk inspect runs/demo/0123456789 --step 300"""

MOST_SEQUENCES = 64
TOKENS = 300_000


def main(argv: list[str] | None = None) -> int:
    """Read the data, print the table and write the page.

    Raises:
        UserError: mmqk.train would refuse a flag, the run reads shards during training, the data cannot be read, or
            --out cannot be written.
    """
    parser = OneSentenceParser(
        prog="mmqk inspect",
        usage="%(prog)s [RUN | --config YAML] [--step N] [--sequences N] [--out DIR] [--FIELD VALUE ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--step", type=int, metavar="N", help="show the sequences of this step of metrics.jsonl")
    text = "checkpoint for the losses of --step (default: the newest one of the run before the step)"
    add("--from", dest="weights", type=Path, metavar="CKPT", help=text)
    add("--sequences", type=int, help=f"most sequences to show (default: 8; with --step {MOST_SEQUENCES})")
    add("--tokens", type=int, default=TOKENS, help=f"tokens to read for the statistics (default: {TOKENS})")
    add("--out", type=Path, help="folder of the page (default: reports/data; with --step reports/stepN)")
    options, rest = parser.parse_known_args(argv)
    if options.sequences is None:
        options.sequences = 8 if options.step is None else MOST_SEQUENCES
    if not 1 <= options.sequences <= MOST_SEQUENCES:
        raise UserError(f"--sequences is {options.sequences}: give 1 to {MOST_SEQUENCES}.")
    if options.tokens < 1:
        raise UserError(f"--tokens is {options.tokens}: give at least 1.")

    from mmqk.config import resolve

    folder = Path(rest[0]) if rest and (Path(rest[0]) / "run.json").is_file() else None
    run = resolve(with_configs(rest)) if folder is None else _run_of(folder, rest[1:])
    if run.data.streams:
        raise UserError(
            "mmqk inspect needs token arrays, whose sequences it can look up by number: set data.read to tokens, or"
            " make a token folder with mmqk data tokenize."
        )
    command = "mmqk inspect " + shlex.join(map(relative_word, sys.argv[1:] if argv is None else argv))
    name = run.out.parent.name  # runs/NAME/<id>
    if options.step is None:
        from mmqk.inspection.page import inspect

        files, lines = inspect(run, options.sequences, options.tokens, command, name)
    else:
        from mmqk.inspection.step import inspect_step

        files, lines = inspect_step(run, folder, options.step, options.weights, options.sequences, command)
    out = options.out or Path("reports") / ("data" if options.step is None else f"step{options.step}")
    for file, content in files.items():
        if not isinstance(content, str):
            files[file] = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    with writing(out):
        write_folder(out, files)
    print("\n".join(lines))
    print(out / "index.html")
    return 0


def _run_of(folder: Path, words: list[str]) -> RunConfig:
    """Return the configuration of a run folder.

    Raises:
        UserError: the run names code that ``words`` does not name, or its data have changed.
    """
    from mmqk.config import resolve

    record = read_run(folder) or {}
    config = record.get("details", {}).get("config", {})
    for section in ("model", "data"):
        patch = config.get(section, {}).get("patch")
        if patch and not any(patch in word for word in words):
            again = f"{section}.patch={patch}"
            raise UserError(f"{folder} has {again}, which is code that runs only if you name it too: add {again}.")
    run = resolve(["--config", str(folder / "config.yaml"), f"--out={folder}", *words])
    if differing := differing_fields(record.get("identity", {}), run.identity):
        raise UserError(f"{folder} was trained with another {differing[0]}: restore it, or name another run.")
    return run
