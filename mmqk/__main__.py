"""The ``mmqk`` command: ``mmqk train`` is ``python -m mmqk.train``; ``mmqk`` alone lists all commands."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from importlib.metadata import version

from mmqk.store import UserError, run_main
from mmqk.store.errors import OneSentenceParser, complete

# For each command: its module, example arguments, and its purpose.
COMMANDS = {
    "train": ("mmqk.train", "demo", "train one run"),
    "ablate": ("mmqk.ablate", "demo", "train a grid of runs with seeds"),
    "report": ("mmqk.report", "runs/demo", "write the page of a grid or of a run"),
    "pack": ("mmqk.pack", "runs/demo --out demo.zip", "pack runs into one small file, for report and ablate"),
    "watch": ("mmqk.watch", "runs/demo", "show runs in a terminal while they train"),
    "init": ("mmqk.init", "my-project", "start a project: a configuration, a grid, a README"),
    "inspect": ("mmqk.inspect", "demo", "show the training data of a configuration on one page"),
    "remedies": ("mmqk.remedies", "", "list every remedy, its field and its source"),
    "tokenize": (
        "mmqk.data.tokenize",
        "--shards 'path/{00..99}.tar' --out tokens/mine",
        "convert your shards to tokens",
    ),
    "ids": (
        "mmqk.data.ids",
        "--train 'ids/*.npy' --vocab-sizes text=65536,image=8192 --out tokens/mine",
        "convert token ids of other tokenizers",
    ),
    "shards": ("mmqk.data.shards", "FOLDER", "write the manifest of your shards"),
    "train-tokenizers": ("mmqk.data.tokenizers.train", "", "train the text and the image tokenizer"),
    "interop": (
        "mmqk.interop",
        "--from path/to/checkpoint --to runs/imported",
        "convert weights from and to transformers",
    ),
}

WIDTH = 40


def main(argv: list[str] | None = None) -> int:
    """Run a command in this process, or print the table of commands.

    Raises:
        UserError: an unknown command, or one that needs a package of the extra lab that is not installed.
    """
    argv = sys.argv[1:] if argv is None else argv
    if "_ARGCOMPLETE" in os.environ:
        argv = _completed_command()
    first = argv[0] if argv else "--help"
    if first == "--version":
        print(f"mmqk {version('mmqk')}")
        return 0
    if first in ("-h", "--help"):
        print(_table())
        return 0
    if first not in COMMANDS:
        raise UserError(f"{first} is not a command of mmqk: give one of {', '.join(COMMANDS)}")
    module = COMMANDS[first][0]
    OneSentenceParser.program = f"mmqk {first}"
    sys.argv = [f"mmqk {first}", *argv[1:]]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)  # exits the process, as python -m does
    except ModuleNotFoundError as error:
        package = (error.name or "mmqk").partition(".")[0]
        if package == "mmqk":
            raise
        raise UserError(f"mmqk {first} needs {package}, which is not installed: pip install 'mmqk[lab]'") from None
    return 0


def _completed_command() -> list[str]:
    """Return the command whose flags the shell completes. If the command itself is incomplete, complete it and
    exit."""
    words = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split(" ")
    if len(words) > 2 and words[1] in COMMANDS:
        os.environ["_ARGCOMPLETE"] = "2"  # number of the word at which argcomplete starts
        return [words[1]]
    parser = argparse.ArgumentParser(prog="mmqk")
    parser.add_argument("command", choices=COMMANDS)
    complete(parser)
    return []


def _table() -> str:
    lines = ["mmqk: an open laboratory for multimodal training instability.", ""]
    for name, (_, arguments, purpose) in COMMANDS.items():
        example = f"mmqk {name} {arguments}".rstrip()
        # A long example gets its own line.
        gap = " " * (WIDTH - len(example)) if len(example) <= WIDTH else f"\n  {'':{WIDTH}}"
        lines.append(f"  {example}{gap}  {purpose}")
    lines += ["", "Each command has --help. Start with the first three. mmqk --version prints the version."]
    return "\n".join(lines)


def cli() -> None:
    """Run the console script."""
    run_main(main)


if __name__ == "__main__":
    run_main(main)
