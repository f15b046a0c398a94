"""The published remedies of remedies.yaml, and ``mmqk remedies``, which prints them. Imports no torch.

docs/remedies.md adds the cost of each remedy and the implementation that it was compared with.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from mmqk.lab.grid.arms import flags
from mmqk.store import OneSentenceParser

# The marks after the sources. A mark states how the source was read.
MARKS = {
    "V": "its text or code was read",
    "S": "a detailed secondary source was read, not the paper itself",
    "A": "only its abstract was read",
    "M": "from memory, not checked",
}


@dataclass(frozen=True)
class Remedy:
    """One remedy; remedies.yaml describes the fields.

    Attributes:
        group: Its section in docs/remedies.md.
        settings: Dotted fields of a run that switch the remedy on.
    """

    group: str
    key: str
    title: str
    purpose: str
    settings: Mapping[str, Any]
    formula: str
    acts_on: str
    cost: str
    source: str

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags for ``mmqk train``."""
        return flags(self.settings)


REMEDIES = tuple(
    Remedy(group=group, settings=entry.pop("set"), **entry)
    for group, entries in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
    for entry in entries
)


def main(argv: list[str] | None = None) -> int:
    """Print every remedy with its flags, formula and source.

    Raises:
        UserError: there is an argument other than ``--help``.
    """
    OneSentenceParser(
        prog="mmqk remedies",
        description="Print every published remedy: the flags that switch it on, its formula, its source.",
        epilog="docs/remedies.md adds the cost of each remedy, and the implementation that it was compared with.",
    ).parse_args(argv)
    print("Add the flags to: mmqk train demo\n")
    for group, remedies in groupby(REMEDIES, lambda remedy: remedy.group):
        print(group.upper())
        for remedy in remedies:
            print(f"  {remedy.title}")
            print(f"      {' '.join(remedy.flags)}")
            for text in (remedy.purpose, remedy.formula, f"on: {remedy.acts_on}", f"from: {remedy.source}"):
                print(textwrap.fill(text, 110, initial_indent=" " * 6, subsequent_indent=" " * 10))
        print()
    print("; ".join(f"[{mark}] {meaning}" for mark, meaning in MARKS.items()))
    return 0
