"""Start a project: ``mmqk init DIR`` writes a configuration, a grid and a README. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from mmqk.lab.grid.arms import folder_name
from mmqk.store import OneSentenceParser, check_empty, named_config

DESCRIPTION = """\
Write config.yaml (the settings of demo.yaml), grid.yaml (two arms, three seeds, one claim) and README.md into a new
or empty folder. Runs use the data that ship with mmqk until you name your own in config.yaml."""

GRID = """\
# Two arms, three seeds each, and one claim, which is registered before the runs.
name: {name}
title: QK-Norm at a raised learning rate
base: [config.yaml]
seeds: [1, 2, 3]
arms:
  plain:
    label: no QK-Norm
    set: {{model.qk_norm.kind: none}}
  qk-norm:
    label: QK-Norm
    set: {{model.qk_norm.kind: rms}}
claims:
  - id: logits
    statement: without QK-Norm the largest attention logit ends at least twice as high
    metric: largest_attention_logit
    treatment: plain
    control: qk-norm
    min_effect: 0.6931   # log 2: this metric is compared on the log scale
    direction: greater
    status: confirmatory
    seeds: 3
    would_contradict: a ratio below 2
report:
  headline: logits
  hero: [plain, qk-norm]
"""

README = """\
# {name}

    mmqk train config.yaml                  # in this folder: one run, into runs/{name}/
    mmqk watch runs                         # its losses and logits while it trains
    mmqk ablate grid.yaml --dry-run         # the runs of the grid
    mmqk ablate grid.yaml                   # train them
    mmqk report runs/{name} --out report    # verdict, figures and tables: report/index.html

To train on your data, run `mmqk data tokenize --shards 'path/{{00..99}}.tar' --out tokens`, then set `pairs: tokens`
under `data:` in config.yaml. For a GPU, set `accelerator: auto` under `trainer:`. `mmqk remedies` lists all remedies.
"""


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
    config = named_config("demo")
    assert config is not None
    settings = config.read_text(encoding="utf-8")
    files = {
        "config.yaml": "# One run: text and image tokens in one sequence.\n" + settings[settings.index("model:") :],
        "grid.yaml": GRID.format(name=name),
        "README.md": README.format(name=name),
    }
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
        print(folder / file)
    return 0
