"""Diagnoses runs that failed: logs, checkpoints and pairs of runs of other tools and of mmqk. ``mmqk diagnose``.

logs         a log of any tool as one table; text: its lines, CSV and JSON; names: its columns
findings     what a log shows, with the rates of `mmqk.bench`
pair         where two logs part
tensors      a checkpoint of any tool as tensors by name
projections  queries and keys of its layers; weights: bounds on logits, gains, and what grows between checkpoints
models       probes of its model, outputs that differ between two models, and all tables of checkpoints
experiments  forks from before a failure
answers      the text and the page of each of these
"""

from __future__ import annotations

import json
from pathlib import Path

from mmqk.store import OneSentenceParser, UserError, write_atomic
from mmqk.store.errors import named_value
from mmqk.store.files import as_json

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
  mmqk diagnose --model step_1000 step_2000 --batch batch.pt --modality image=4:8196"""


def parser() -> OneSentenceParser:
    """Return the parser of the command line."""
    made = OneSentenceParser(prog="mmqk diagnose", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    add = made.add_argument
    add("files", nargs="*", type=Path, metavar="FILE", help="a log or the folder of a run; two: failing, healthy")
    text = "the column of a tag, loss=train/ce"
    add("--map", type=named_value, action="append", default=[], metavar="TAG=COLUMN", help=text)
    text = "the column of the optimizer step; with --experiments, the step of the event"
    add("--step", metavar="COLUMN", help=text)
    add("--model", nargs="+", default=[], type=Path, metavar="PATH", help="a checkpoint, and later ones of its run")
    add("--batch", type=Path, metavar="FILE", help="token ids to probe the checkpoint with")
    add("--modality", action="append", default=[], metavar="NAME=A:B", help="the ids of a modality, image=4:8196")
    text = "the attention logit up to which growth between checkpoints is extrapolated (default: 1000)"
    add("--limit", type=float, default=1000.0, metavar="LOGIT", help=text)
    add("--experiments", action="store_true", help="train forks of a run of mmqk from before its failure")
    text = "with --experiments: a field that all forks set, such as data.patch, which a fork must name again"
    add("--set", dest="fields", type=named_value, action="append", default=[], metavar="FIELD=VALUE", help=text)
    text = "folder for the page and diagnosis.json (default: reports/diagnosis)"
    add("--out", type=Path, default=Path("reports/diagnosis"), metavar="FOLDER", help=text)
    add("--json", action="store_true", help="print the content of diagnosis.json instead of the text")
    return made


def main(argv: list[str] | None = None) -> int:
    """Diagnose, print the text, write the page; return 1 if there is a finding, else 0.

    Raises:
        UserError: a wrong command line or a file that cannot be read.
    """
    options = parser().parse_args(argv)
    if len(options.files) > 2 or not (options.files or options.model):
        raise UserError("give one log, or two to compare, or --model with a checkpoint: see mmqk diagnose --help")
    from mmqk.diagnose import answers  # it imports pandas and matplotlib

    way = (
        answers.of_models if options.model
        else answers.of_experiments if options.experiments
        else answers.of_pair if len(options.files) == 2
        else answers.of_log
    )  # fmt: skip
    answer = way(options)
    text = json.dumps(as_json(answer.record), indent=1, ensure_ascii=False, allow_nan=False)
    print(text if options.json else answer.text())
    options.out.mkdir(parents=True, exist_ok=True)
    write_atomic(options.out / "diagnosis.json", text + "\n")
    write_atomic(options.out / "index.html", answer.page())
    if not options.json:
        print(f"\n{options.out / 'index.html'}")
    return int(answer.found)
