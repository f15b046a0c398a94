"""The command line: ``mmqk`` lists the commands, and ``mmqk train`` calls the function of its command.

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
    "pack": ("mmqk.cli:pack", "runs/demo --out demo.zip", "pack runs into one small file, for report and ablate"),
    "watch": ("mmqk.watch:main", "runs/demo", "show runs in a terminal while they train"),
    "init": ("mmqk.lab.project:main", "my-project", "start a project: a configuration, a grid, a README"),
    "inspect": ("mmqk.inspection:main", "demo", "show the training data of a configuration on one page"),
    "preflight": ("mmqk.preflight:main", "train:checked", "check your own model and batch before training"),
    "bench": ("mmqk.bench:main", "runs/bench --rule mine:score", "score alarms on runs whose fault is known"),
    "remedies": ("mmqk.lab.remedies:main", "", "list every remedy, its field and its source"),
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
    from mmqk.lab.ablation import read_ablation
    from mmqk.store import OneSentenceParser, UserError
    from mmqk.store.pack import FEW_DIGITS, damaged_files, write_pack

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
    grid = read_ablation(options.runs)  # no command can read a pack with a damaged registration
    write_pack(options.runs, out, options.small)
    if damaged := damaged_files(options.runs, is_grid=grid is not None):
        print(f"the runs are packed as they are, with these damaged files: {', '.join(damaged)}")
    size = out.stat().st_size
    print(f"{out}: {size / 1e6:.1f} MB" if size >= 1e5 else f"{out}: {size / 1e3:.0f} kB")
    return 0


def run() -> None:
    """Run the console script. Only after this import can `run_main` report Ctrl-C."""
    try:
        from mmqk.store import run_main
    except KeyboardInterrupt:
        print("mmqk: interrupted", file=sys.stderr)
        sys.exit(130)
    run_main(main)
