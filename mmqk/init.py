"""Start a project: ``mmqk init my-project``."""

from __future__ import annotations

from pathlib import Path

from mmqk.lab.grid.arms import folder_name
from mmqk.store import OneSentenceParser, check_empty, find_file

DESCRIPTION = """\
Write config.yaml (the settings of demo.yaml), grid.yaml (two arms, three seeds, one claim) and README.md into a new
or empty folder. Runs use the data that ship with mmqk until you name your own in config.yaml."""


def main(argv: list[str] | None = None) -> int:
    """Write the files of a project.

    Raises:
        UserError: the folder is not empty, or its name is not a valid name of a grid.
    """
    parser = OneSentenceParser(prog="mmqk init", description=DESCRIPTION)
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
