"""The command line: ``mmqk`` lists the commands, and ``mmqk NAME`` calls `main` of the module of that command. ``mmqk
init`` is in this file.

``python -m mmqk.train``, ``python -m mmqk.ablate`` and ``python -m mmqk.report`` work too.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from mmqk import __version__

# For each command: its function, example arguments, and its purpose.
COMMANDS = {
    "train": ("mmqk.train:main", "demo", "train one run"),
    "ablate": ("mmqk.ablate:main", "demo", "train a grid of runs with seeds"),
    "report": ("mmqk.report:main", "runs/demo", "write the page of a grid or of a run"),
    "pack": ("mmqk.store.pack:main", "runs/demo --out demo.zip", "pack runs into one small file for report and ablate"),
    "watch": ("mmqk.watch:main", "runs/demo", "show runs in a terminal while they train"),
    "init": ("mmqk.cli:init", "my-project", "start a project: a configuration, a grid, a README"),
    "inspect": ("mmqk.inspection:main", "demo", "show the training data of a configuration on one page"),
    "preflight": ("mmqk.preflight:main", "train:checked", "check your own model and batch before training"),
    "diagnose": ("mmqk.diagnose:main", "wandb.csv", "say what failed first in a run, from its log or checkpoints"),
    "bench": ("mmqk.bench:main", "runs/bench --rule mine:score", "score alarms on runs whose fault is known"),
    "remedies": ("mmqk.lab.remedies:main", "", "list every remedy, its field and its source"),
    "data tokenize": (
        "mmqk.data.tokens.tokenize:main",
        "--shards 'path/{00..99}.tar' --out tokens/mine",
        "convert your shards to tokens",
    ),
    "data ids": (
        "mmqk.data.tokens.ids:main",
        "--train 'ids/*.npy' --vocab-sizes text=65536,image=8192 --out tokens/mine",
        "convert token ids of other tokenizers",
    ),
    "data tokenizers": ("mmqk.data.tokenizers.train:main", "", "train the text and the image tokenizer"),
    "interop": (
        "mmqk.interop.folders:main",
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
    from mmqk.store import UserError

    argv = sys.argv[1:] if argv is None else argv
    if argv == ["--version"]:
        print(f"mmqk {__version__}")
        return 0
    for group in ("", "data"):
        if argv in (named := group.split(), [*named, "-h"], [*named, "--help"]):
            print(_table(group))
            return 0
    name = next((" ".join(argv[:n]) for n in (1, 2) if " ".join(argv[:n]) in COMMANDS), None)
    if name is None:
        raise UserError(f"{' '.join(argv[:2])} is not a command of mmqk: give one of {', '.join(COMMANDS)}")
    module, _, function = COMMANDS[name][0].partition(":")
    try:
        return int(getattr(importlib.import_module(module), function)(argv[len(name.split()) :]))
    except ModuleNotFoundError as error:
        package = (error.name or "mmqk").partition(".")[0]
        if package == "mmqk":
            raise
        raise UserError(f"mmqk {name} needs {package}, which is not installed: pip install 'mmqk[lab]'") from None


def _table(group: str) -> str:
    """Return the table of the commands whose names begin with ``group``."""
    lines = ["mmqk: an open laboratory for multimodal training instability.", ""]
    for name, (_, arguments, purpose) in COMMANDS.items():
        if not name.startswith(group):
            continue
        example = f"mmqk {name} {arguments}".rstrip()
        # A long example gets its own line.
        gap = " " * (WIDTH - len(example)) if len(example) <= WIDTH else f"\n  {'':{WIDTH}}"
        lines.append(f"  {example}{gap}  {purpose}")
    first = "" if group else " Start with the first three. mmqk --version prints the version."
    return "\n".join([*lines, "", f"Each command has --help.{first}"])


INIT = """\
Write config.yaml (the settings of demo.yaml), grid.yaml (two arms, three seeds, one claim) and README.md into a new
or empty folder. Runs use the data that ship with mmqk until you name your own in config.yaml."""


def init(argv: list[str]) -> int:
    """Write the files of a project: ``mmqk init my-project``.

    Raises:
        UserError: the folder is not empty, or its name is not a valid name of a grid.
    """
    from mmqk.lab.grid.arms import folder_name
    from mmqk.store import OneSentenceParser, check_empty, find_file

    parser = OneSentenceParser(prog="mmqk init", description=INIT)
    text = "a new or empty folder; its name becomes the name of the grid"
    parser.add_argument("folder", type=Path, metavar="DIR", help=text)
    folder = parser.parse_args(argv).folder
    check_empty(folder, "DIR")
    name = folder_name(folder.resolve().name, "DIR")
    folder.mkdir(parents=True, exist_ok=True)
    settings = find_file("configs/demo.yaml").read_text(encoding="utf-8")
    settings = "# One run: text and image tokens in one sequence.\n" + settings[settings.index("model:") :]
    files = {"config.yaml": settings}
    for file in ("grid.yaml", "README.md"):
        files[file] = find_file(f"configs/project/{file}").read_text(encoding="utf-8").replace("PROJECT", name)
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
        print(folder / file)
    return 0


def run() -> None:
    """Run the console script. Only after this import can `run_main` report Ctrl-C."""
    try:
        from mmqk.store import run_main
    except KeyboardInterrupt:
        print("mmqk: interrupted", file=sys.stderr)
        sys.exit(130)
    run_main(main)
