"""Show the training data of a run: ``mmqk inspect --config configs/demo.yaml``."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from mmqk.store import OneSentenceParser, UserError, relative_word, with_configs, write_folder
from mmqk.store.files import writing

DESCRIPTION = """\
Show the training data of a configuration and seed: its first sequences with text, images, modalities, targets and
documents, and statistics of the tokens. Takes every flag of mmqk.train."""

EPILOG = """\
files in --out:
  index.html        the page, in one file without external resources
  statistics.json   the numbers of the page

examples:
  mmqk inspect --config configs/demo.yaml
  mmqk inspect --config configs/demo.yaml --data.pack documents --seed 1
  mmqk inspect --config configs/demo.yaml --data.mix '{"dial": 1}'"""

MOST_SEQUENCES = 64


def main(argv: list[str] | None = None) -> int:
    """Read the data, print the table and write the page.

    Raises:
        UserError: mmqk.train would refuse a flag, the data cannot be read, or --out cannot be written.
    """
    parser = OneSentenceParser(
        prog="mmqk inspect",
        usage="%(prog)s [--config YAML] [--sequences N] [--out DIR] [--FIELD VALUE ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--sequences", type=int, default=8, help="sequences to show (default: 8)")
    add("--tokens", type=int, default=300_000, help="tokens to read for the statistics (default: 300000)")
    add("--out", type=Path, default=Path("reports/data"), help="folder of the page (default: reports/data)")
    options, rest = parser.parse_known_args(argv)
    if not 1 <= options.sequences <= MOST_SEQUENCES:
        raise UserError(f"--sequences is {options.sequences}: give 1 to {MOST_SEQUENCES}.")
    if options.tokens < 1:
        raise UserError(f"--tokens is {options.tokens}: give at least 1.")

    from mmqk.config import resolve
    from mmqk.inspection.page import inspect

    rest = with_configs(rest)
    run = resolve(rest)
    command = "mmqk inspect " + shlex.join(map(relative_word, _as_given(parser, options, rest)))
    name = run.out.parent.name  # runs/NAME/<id>
    files, lines = inspect(run, options.sequences, options.tokens, command, name)
    numbers = json.dumps(files["statistics.json"], indent=1, ensure_ascii=False) + "\n"
    with writing(options.out):
        write_folder(options.out, {**files, "statistics.json": numbers})
    print("\n".join(lines))
    print(options.out / "index.html")
    return 0


def _as_given(parser: argparse.ArgumentParser, options: argparse.Namespace, rest: list[str]) -> list[str]:
    """Return the command line without --out. The flags of mmqk inspect itself come last, and only if they differ from
    their defaults."""
    given = [(name, getattr(options, name)) for name in ("sequences", "tokens")]
    return [*rest, *(w for n, v in given if v != parser.get_default(n) for w in (f"--{n}", str(v)))]
