"""Text documents to learn words from: a folder with a manifest, or any files of JSON lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from mmqk.shards.images import Dropped
from mmqk.shards.lines import read_lines
from mmqk.shards.manifest import manifest_hash
from mmqk.shards.pairs import read_text
from mmqk.shards.samples import text_of
from mmqk.shards.tars import expand
from mmqk.store import UserError, hash_fraction, identity_hash
from mmqk.tokenizers.choice import Selection, account, dropped_account, spread

PATTERN = set("{*?[")
ENDINGS = (".jsonl", ".json", ".ndjson", ".gz", ".xz")


class Documents:
    """Documents of the train split; none for the name ''.

    Raises:
        UserError: a pattern names no file, or the folder has no manifest.
    """

    def __init__(self, text: Sequence[str | Path] | str | Path, choice: Selection | None = None) -> None:
        names = [str(t) for t in ([text] if isinstance(text, str | Path) else text)]
        self.choice, self.name = choice or Selection(), " ".join(names)
        self.folder: Path | None = None
        self.paths: list[Path] = []
        if len(names) == 1 and not PATTERN & set(names[0]) and not names[0].endswith(ENDINGS):
            self.folder = Path(names[0]) if names[0] else None
        else:
            self.paths = expand(names)
        self.identity()  # a folder without a manifest is told of at once

    def read(self) -> tuple[list[str], str]:
        """The texts, and an account of what was not taken, empty if there is nothing to say.

        Of a folder that holds more characters than asked for, documents spread evenly over it; of files the
        beginning of each, so that no file need be unpacked to its end.

        Raises:
            UserError: a file is missing, damaged or cut short, or has no text.
        """
        if self.folder is not None:
            found = list(read_text(self.folder, "train"))
            total = sum(map(len, found))
            kept = spread(len(found), len(found) * self.choice.characters // max(1, total))
            said = account(len(kept), len(found), "documents") if len(kept) < len(found) else ""
            return [found[i] for i in kept], said
        if not self.paths:
            return [], ""
        dropped = Counter[str]()
        cut = 0
        texts: list[str] = []
        left = self.choice.characters
        for number, path in enumerate(self.paths):
            budget = left // (len(self.paths) - number)
            taken = 0
            for text in self._texts(path, dropped):
                if taken >= budget:
                    cut += 1
                    break
                texts.append(text)
                taken += len(text)
            left -= taken
        said = f"{len(texts):,} documents read"
        if cut:
            said += f", of {cut:,} of {len(self.paths):,} files the beginning only (--characters)"
        said += dropped_account(dropped)
        if not texts:
            raise UserError(f'{self.name} has no documents ({said}): give JSON lines with a field "text".')
        return texts, said

    def _texts(self, path: Path, dropped: Counter[str]) -> Iterator[str]:
        """Texts of a file that are not held out; what cannot be used is counted."""
        for _, line, _ in read_lines(path):
            if not line.strip():
                continue
            try:
                text = text_of(line)
            except Dropped as fault:
                dropped[fault.reason] += 1
                continue
            if hash_fraction(text.encode()) >= self.choice.val_fraction:
                yield text

    def identity(self) -> str:
        """Hash of the manifest, or of the files' names and lengths (not of their content), 10 hex digits; or ''."""
        if self.folder is not None:
            return manifest_hash(self.folder)
        if not self.paths:
            return ""
        return identity_hash({"files": [[path.name, path.stat().st_size] for path in self.paths]})
