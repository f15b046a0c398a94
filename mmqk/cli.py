"""The command line: ``mmqk`` lists the commands, and ``mmqk train`` calls the function of its command.

``python -m mmqk.train``, ``python -m mmqk.ablate`` and ``python -m mmqk.report`` work too.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import version

from mmqk.store import UserError, run_main

# For each command: its function, example arguments, and its purpose.
COMMANDS = {
    "train": ("mmqk.train:process", "demo", "train one run"),
    "ablate": ("mmqk.ablate:main", "demo", "train a grid of runs with seeds"),
    "report": ("mmqk.report:main", "runs/demo", "write the page of a grid or of a run"),
    "pack": ("mmqk.pack:main", "runs/demo --out demo.zip", "pack runs into one small file, for report and ablate"),
    "watch": ("mmqk.watch:main", "runs/demo", "show runs in a terminal while they train"),
    "init": ("mmqk.init:main", "my-project", "start a project: a configuration, a grid, a README"),
    "inspect": ("mmqk.inspect:main", "demo", "show the training data of a configuration on one page"),
    "preflight": ("mmqk.preflight:main", "train:checked", "check your own model and batch before training"),
    "remedies": ("mmqk.remedies:main", "", "list every remedy, its field and its source"),
    "data tokenize": (
        "mmqk.data.tokenize:main",
        "--shards 'path/{00..99}.tar' --out tokens/mine",
        "convert your shards to tokens",
    ),
    "data ids": (
        "mmqk.data.ids:main",
        "--train 'ids/*.npy' --vocab-sizes text=65536,image=8192 --out tokens/mine",
        "convert token ids of other tokenizers",
    ),
    "data shards": ("mmqk.data.shards.manifest:main", "FOLDER", "write the manifest of your shards"),
    "data tokenizers": ("mmqk.data.tokenizers.train:main", "", "train the text and the image tokenizer"),
    "interop": (
        "mmqk.interop.command:main",
        "--from path/to/checkpoint --to runs/imported",
        "convert weights from and to transformers",
    ),
}
WIDTH = 40


def main(argv: list[str] | None = None) -> int:
    """Run a command, or print the table of commands; return the exit code.

    Raises:
        UserError: an unknown command, one that needs a package of the extra lab that is not installed, or an error of
            the command.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--version"]:
        print(f"mmqk {version('mmqk')}")
        return 0
    if not argv or argv[0] in ("-h", "--help"):
        print(_table())
        return 0
    name = next((" ".join(argv[:n]) for n in (1, 2) if " ".join(argv[:n]) in COMMANDS), None)
    if name is None:
        raise UserError(f"{' '.join(argv[:2])} is not a command of mmqk: give one of {', '.join(COMMANDS)}")
    module, _, function = COMMANDS[name][0].partition(":")
    try:
        code: int = getattr(importlib.import_module(module), function)(argv[len(name.split()) :])
        return code
    except ModuleNotFoundError as error:
        package = (error.name or "mmqk").partition(".")[0]
        if package == "mmqk":
            raise
        raise UserError(f"mmqk {name} needs {package}, which is not installed: pip install 'mmqk[lab]'") from None


def _table() -> str:
    lines = ["mmqk: an open laboratory for multimodal training instability.", ""]
    for name, (_, arguments, purpose) in COMMANDS.items():
        example = f"mmqk {name} {arguments}".rstrip()
        # A long example gets its own line.
        gap = " " * (WIDTH - len(example)) if len(example) <= WIDTH else f"\n  {'':{WIDTH}}"
        lines.append(f"  {example}{gap}  {purpose}")
    lines += ["", "Each command has --help. Start with the first three. mmqk --version prints the version."]
    return "\n".join(lines)


def run() -> None:
    """Run the console script."""
    run_main(main)
