"""Diagnoses runs that failed: logs, checkpoints and pairs of runs of other tools and of mmqk. ``mmqk diagnose``.

logs         a log of any tool as one table; text: its lines, CSV and JSON; names: its columns
findings     what a log shows, with the rates of `mmqk.bench`, and where two logs part
tensors      a checkpoint of any tool as tensors by name, and as a model that is probed
projections  queries and keys of its layers; weights: bounds on logits, gains, and what grows between checkpoints
experiments  forks from before a failure
answers      the text and the page of each of these
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from mmqk.store import OneSentenceParser, UserError
from mmqk.store.errors import named_value
from mmqk.store.files import as_json, write_folder

DESCRIPTION = """\
Say what left its range first in a run, which rules fire on its log and how often they are right on the bench of
failures, which run of the zoo is near, and what to try and to log next. It never says what the cause is."""

EPILOG = """\
exit code: 0 no rule fired, 1 a finding, 2 a wrong command or file

files in --out:
  index.html      the page, in one file without external resources
  diagnosis.json  the same as data; docs/diagnose.md lists its fields

examples:
  mmqk diagnose wandb.csv --map loss=train/ce
  mmqk diagnose failed.csv healthy.csv                   how the first run parts from the second
  mmqk diagnose runs/mine --experiments
  mmqk diagnose --model step_1000 step_2000 step_3000 --batch batch.pt --modality image=4:8196"""


def block_of(text: str) -> tuple[str, range]:
    """Return the name and the ids of ``--modality image=4:8196``."""
    match = re.fullmatch(r"([^\W\d]\w*)=(\d+):(\d+)", text)
    if not match or int(match[2]) >= int(match[3]):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FIRST:END: give its ids, as in image=4:8196")
    return match[1], range(int(match[2]), int(match[3]))


def main(argv: list[str] | None = None) -> int:
    """Diagnose, print the text, write the page; return 1 if there is a finding, else 0.

    Raises:
        UserError: a wrong command line or a file that cannot be read.
    """
    parser = OneSentenceParser(prog="mmqk diagnose", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    add = parser.add_argument
    add("files", nargs="*", type=Path, metavar="FILE", help="a log or the folder of a run; two: failing, healthy")
    text = "the column of a tag, loss=train/ce"
    add("--map", type=named_value, action="append", default=[], metavar="TAG=COLUMN", help=text)
    add("--step", metavar="COLUMN", help="column of the optimizer step; with --experiments, step of the event")
    add("--model", nargs="+", default=[], type=Path, metavar="PATH", help="checkpoints of a run, the oldest first")
    add("--batch", type=Path, metavar="FILE", help="token ids to probe the checkpoint with")
    add("--modality", type=block_of, action="append", default=[], metavar="NAME=A:B", help="ids, as in image=4:8196")
    text = "the attention logit up to which growth between checkpoints is extrapolated (default: 1000)"
    add("--limit", type=float, default=1000.0, metavar="LOGIT", help=text)
    add("--experiments", action="store_true", help="train forks of a run of mmqk from before its failure")
    text = "with --experiments: a field that all forks set, such as data.patch, which a fork must name again"
    add("--set", dest="fields", type=named_value, action="append", default=[], metavar="FIELD=VALUE", help=text)
    add("--out", type=Path, default=Path("reports/diagnosis"), metavar="FOLDER", help="default: reports/diagnosis")
    add("--json", action="store_true", help="print the content of diagnosis.json instead of the text")
    options = parser.parse_args(argv)
    if len(options.files) > 2 or not (options.files or options.model):
        raise UserError("give one log, or two to compare, or --model with a checkpoint: see mmqk diagnose --help")
    from mmqk.diagnose import answers  # it imports pandas and matplotlib

    way, reads = (
        (answers.of_models, {"model", "batch", "modality", "limit"}) if options.model
        else (answers.of_experiments, {"experiments", "files", "step", "fields"}) if options.experiments
        else (answers.of_pair if len(options.files) == 2 else answers.of_log, {"files", "map", "step"})
    )  # fmt: skip
    for name, value in vars(options).items():
        if name not in {"out", "json", *reads} and value not in ([], parser.get_default(name)):
            option = {"files": " ".join(map(str, options.files)), "fields": "--set"}.get(name, f"--{name}")
            given = "--model" if options.model else "--experiments" if options.experiments else "a log"
            raise UserError(f"{option} does nothing with {given}: leave it out, or see mmqk diagnose --help")
    answer = way(options)
    text = json.dumps(as_json(answer.record), indent=1, ensure_ascii=False, allow_nan=False)
    print(text if options.json else answer.text())
    write_folder(options.out, {"diagnosis.json": text + "\n", "index.html": answer.page()})
    if not options.json:
        print(f"\n{options.out / 'index.html'}")
    return int(answer.record["found"])
