"""The command line: ``mmqk`` lists the commands, and ``mmqk train`` calls the function of its command.

``python -m mmqk.train``, ``python -m mmqk.ablate`` and ``python -m mmqk.report`` work too.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmqk import __version__

if TYPE_CHECKING:
    from mmqk.lab.runner.watch import Follow

# For each command: its function, example arguments, and its purpose.
COMMANDS = {
    "train": ("mmqk.train:main", "demo", "train one run"),
    "ablate": ("mmqk.ablate:main", "demo", "train a grid of runs with seeds"),
    "report": ("mmqk.report:main", "runs/demo", "write the page of a grid or of a run"),
    "pack": ("mmqk.cli:pack", "runs/demo --out demo.zip", "pack runs into one small file, for report and ablate"),
    "watch": ("mmqk.cli:watch", "runs/demo", "show runs in a terminal while they train"),
    "init": ("mmqk.cli:init", "my-project", "start a project: a configuration, a grid, a README"),
    "inspect": ("mmqk.inspection:main", "demo", "show the training data of a configuration on one page"),
    "preflight": ("mmqk.cli:preflight", "train:checked", "check your own model and batch before training"),
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

PACK = """\
Write the files that a report needs from a folder of runs into one small zip file: configurations, status, metrics,
alarms and the registration of the claims; no checkpoints and no TensorBoard events. mmqk report and mmqk.load_runs
read the file like the folder, and mmqk ablate --from continues the grid from it.

The report of a pack with the name of its folder equals the report of the folder byte for byte, unless --small rounds
its numbers."""

INIT = """\
Write config.yaml (the settings of demo.yaml), grid.yaml (two arms, three seeds, one claim) and README.md into a new
or empty folder. Runs use the data that ship with mmqk until you name your own in config.yaml."""


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
        code: int = getattr(importlib.import_module(module), function)(argv[len(name.split()) :])
        return code
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
    lines += ["", f"Each command has --help.{first}"]
    return "\n".join(lines)


def pack(argv: list[str] | None = None) -> int:
    """Pack runs into one file and print its path.

    Raises:
        UserError: the folder has no runs, its ablation.json is damaged, or --out is not a file name that ends in
            .zip.
    """
    from mmqk.store import OneSentenceParser, UserError
    from mmqk.store.folder import read_ablation
    from mmqk.store.pack import FEW_DIGITS, write_pack

    parser = OneSentenceParser(prog="mmqk pack", description=PACK, allow_abbrev=False)
    parser.add_argument("runs", type=Path, help="folder of a grid, an arm or a run")
    parser.add_argument("--out", type=Path, help="the output file (default: the folder's name and .zip)")
    parser.add_argument(
        "--small",
        action="store_true",
        help=f"a smaller file for hundreds of runs: only the series that a report reads, with {FEW_DIGITS} digits",
    )
    options = parser.parse_args(argv)
    out = options.out or Path(f"{options.runs.resolve().name}.zip")
    if out.suffix != ".zip" or out.is_dir():
        raise UserError(f"--out {out} is not the name of a zip file: let it end in .zip")
    read_ablation(options.runs)  # no command can read a pack with a damaged registration
    write_pack(options.runs, out, options.small)
    size = out.stat().st_size
    print(f"{out}: {size / 1e6:.1f} MB" if size >= 1e5 else f"{out}: {size / 1e3:.0f} kB")
    return 0


WATCH = """\
Show runs while they train: losses by modality, the largest attention logits and norms with their layers, alarms,
speed and time left. Waits for the first run of a folder. Ends when every run has ended, or on Ctrl-C."""

WATCH_EXAMPLES = """\
examples:
  mmqk watch runs/demo                     every run of a grid
  mmqk watch runs/demo/mixed-0123456789    one arm
  mmqk watch --once runs/cpu/0123456789    print one run once"""

SHORTEST_SECONDS = 0.2
NARROWEST = 60


def watch(argv: list[str] | None = None) -> int:
    """Show runs until all of them have ended, or show them once.

    Raises:
        UserError: a path is not a folder; or, if the runs are shown once, a folder does not exist or has no run.
    """
    from mmqk.store import NoRun, OneSentenceParser, UserError

    parser = OneSentenceParser(prog="mmqk watch", description=WATCH, epilog=WATCH_EXAMPLES, allow_abbrev=False)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of grids, of arms or of runs")
    text = "print one frame and end (the default without a terminal or on a dumb terminal)"
    parser.add_argument("--once", action="store_true", help=text)
    text = "seconds between updates (default: 1)"
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help=text)
    options = parser.parse_args(argv)
    if not options.every >= SHORTEST_SECONDS:
        raise UserError(f"--every is {options.every}: give at least {SHORTEST_SECONDS} seconds")

    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from mmqk.lab.runner.watch import follow, runs_table

    console = Console()
    if options.once or not sys.stdout.isatty() or console.is_dumb_terminal:  # cannot redraw
        views = [run.look() for run in follow(options.runs)]
        console.print(runs_table(views, max(NARROWEST, console.width)), soft_wrap=True)
        return 0
    followed: dict[tuple[Path, str, str], Follow] = {}
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            try:
                # A grid adds runs, and changes the folder of a run when it selects its learning rate.
                now = {(run.folder, run.name, run.never): run for run in follow(options.runs)}
                followed = {key: followed.get(key, run) for key, run in now.items()}
            except NoRun as none:
                live.update(Text(f"{none}: waiting for one to start (Ctrl-C ends)"), refresh=True)
            else:
                views = [run.look() for run in followed.values()]
                live.update(runs_table(views, max(NARROWEST, console.width)), refresh=True)
                if all(view.ended for view in views):
                    break
            time.sleep(options.every)
    return 0


PREFLIGHT = """\
Check a model and a batch before training: leaks between tokens, attention, loss and parameters. Prints a line for
each check. The exit code is 1 if a check failed."""

PREFLIGHT_EXAMPLES = """\
The function takes no arguments. It returns a dictionary with model and batch, and optionally loss, optimizer and
modality, or a tuple in this order (docs/check_your_model.md).

examples:
  mmqk preflight train:checked                     the function checked() in train.py
  mmqk preflight train:checked --json checks.json  also write the lines as JSON"""

NAMES = ("model", "batch", "loss", "optimizer", "modality")


def preflight(argv: list[str] | None = None) -> int:
    """Check what the function returns; return 1 if a check failed.

    Raises:
        UserError: the function does not exist or returns something else.
    """
    from mmqk.store import OneSentenceParser
    from mmqk.store.errors import FAILED_EXIT

    parser = OneSentenceParser(
        prog="mmqk preflight", description=PREFLIGHT, epilog=PREFLIGHT_EXAMPLES, allow_abbrev=False
    )
    parser.add_argument("function", metavar="module:function", help="a function without arguments")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the lines as JSON")
    options = parser.parse_args(argv)
    arguments = _called(options.function)

    from mmqk.monitors import preflight as check

    table = check(**arguments)
    print(table)
    if options.json is not None:
        options.json.write_text(table.to_json() + "\n", encoding="utf-8")
    return FAILED_EXIT if table.failed else 0


def _called(name: str) -> dict[str, Any]:
    """Call module:function and return its result as the arguments of `mmqk.monitors.preflight`, by name."""
    from mmqk.store import UserError

    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UserError(f"{name} is not module:function: give both, as in train:checked for checked() in train.py")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UserError(f"there is no module {module}: give a module that Python can import from here") from error
    if not callable(function):
        raise UserError(f"{module} has no function {attribute}: give the name of a function without arguments")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise UserError(f"{name} takes arguments: give a function without arguments") from error
    result = function()
    if isinstance(result, tuple):
        result = dict(zip(NAMES, result, strict=False))
    if not isinstance(result, Mapping) or not {"model", "batch"} <= set(result) <= set(NAMES):
        keys = ", ".join(map(str, result)) if isinstance(result, Mapping) else type(result).__name__
        raise UserError(f"{name} returns {keys}: return a dictionary with model and batch, and optionally {NAMES[2:]}")
    return dict(result)


def init(argv: list[str] | None = None) -> int:
    """Write the files of a project.

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
