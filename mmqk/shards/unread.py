"""Count files and samples that no document uses, by reason, with a few example names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

EXAMPLES = 5
LONGEST_SHOWN = 200  # characters of a name

NO_DOT = "in no sample: the name has no dot"
HIDDEN = "in no sample: the name begins with a dot"
META = "in no sample: webdataset reserves the name"
NOT_REGULAR = "links, devices and sparse files"
OF_DROPPED = "of dropped samples"
UNUSED = "in a sample that does not use them"
DOTTED = "with a second dot in the name"


@dataclass
class ReasonCounts:
    """Counts by reason.

    Attributes:
        counts: number by reason.
        examples: the first few names by reason.
    """

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The sum of the counts."""
        return sum(self.counts.values())

    def add(self, reason: str, name: str) -> None:
        """Add one to the count of a reason, and keep the name if the reason has fewer than 5 examples."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            examples.append(name)

    def take(self, other: ReasonCounts, source: str = "") -> None:
        """Add other counts and their examples; ``source`` becomes a prefix of each example."""
        for reason, names in other.examples.items():
            self.counts[reason] = self.counts.get(reason, 0) + other.counts[reason]
            examples = self.examples.setdefault(reason, [])
            examples += [source + name for name in names[: EXAMPLES - len(examples)]]

    def by_count(self) -> dict[str, int]:
        """Return the counts, the largest first."""
        return dict(sorted(self.counts.items(), key=lambda item: (-item[1], item[0])))

    def reason_lines(self) -> Iterator[str]:
        """Yield a line per reason: its count and examples."""
        for reason, count in self.by_count().items():
            yield f"  {reason}: {count:,} ({', '.join(map(printable, self.examples[reason]))})"


@dataclass
class Unread(ReasonCounts):
    """Counts by reason of files that were not read from their archives, because no document uses them."""

    def lines(self, total: int) -> Iterator[str]:
        """Yield the lines to print, given the total number of files; none if all files were read."""
        if not self.total:
            return
        yield f"{self.total:,} of {total:,} files were not read:"
        yield from self.reason_lines()
        if DOTTED in self.counts:
            yield self.key_rule()

    def key_rule(self) -> str:
        """Return a sentence that explains the key of a file with a second dot in its name and suggests another
        name."""
        path = printable(self.examples[DOTTED][0].rpartition(": ")[2])
        folder, slash, name = path.rpartition("/")
        key, _, rest = name.partition(".")
        return (
            f"the key of a sample is the name up to its first dot, so {name} is the file {rest} of the sample"
            f" {folder}{slash}{key}: name it {name.replace('.', '_', name.count('.') - 1)}"
            " to make it a separate sample"
        )


def printable(text: str) -> str:
    """Return the text with control characters replaced by "?", because a name in an archive may contain terminal
    commands. The middle of a long text is left out."""
    if len(text) > LONGEST_SHOWN:
        text = f"{text[: LONGEST_SHOWN // 2]}...{text[-LONGEST_SHOWN // 2 :]}"
    return "".join(c if c.isprintable() else "?" for c in text)
