"""Text documents for the text tokenizer: a folder with a manifest, or files of JSON lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from mmqk.data.shards.held_out import default_share
from mmqk.data.shards.images import Dropped
from mmqk.data.shards.lines import read_lines
from mmqk.data.shards.manifest import manifest_hash
from mmqk.data.shards.pairs import read_text
from mmqk.data.shards.samples import text_of
from mmqk.data.shards.tars import expand
from mmqk.data.tokenizers.choice import Selection, dropped_summary, spread, summary
from mmqk.store import UserError, hash_fraction, identity_hash


class Documents:
    """The text documents of the train split; none if `text` is an empty name.

    Raises:
        UserError: a pattern names no file, or the folder has no manifest.
    """

    def __init__(self, text: Sequence[str | Path] | str | Path, selection: Selection | None = None) -> None:
        names = [str(t) for t in ([text] if isinstance(text, str | Path) else text)]
        self.selection, self.name = selection or Selection(), " ".join(names)
        self.folder: Path | None = None
        self.paths: list[Path] = []
        if len(names) == 1 and names[0] and Path(names[0]).is_dir():
            self.folder = Path(names[0])
        elif names != [""]:
            self.paths = expand(names)
        self.identity()  # raises for a folder without a manifest

    def read(self) -> tuple[list[str], str]:
        """Return the texts, and a summary of how many documents were read.

        The summary is empty if all documents of a folder were read. If the texts have more characters than the limit,
        a folder gives documents that are spread evenly over it (at least one), and a JSON lines file gives only its
        beginning, so that it is not decompressed to its end.

        Raises:
            UserError: a file is missing, damaged or truncated, or has no text.
        """
        if self.folder is not None:
            documents = list(read_text(self.folder, "train"))
            n, total = len(documents), sum(map(len, documents))
            indices = spread(n, max(1, n * self.selection.characters // max(1, total)))
            return [documents[i] for i in indices], summary(len(indices), n, "documents") if len(indices) < n else ""
        if not self.paths:
            return [], ""
        val_fraction = self.selection.val_fraction
        if val_fraction is None:
            texts_of_all = (text for path in self.paths for text in self._texts(path, Counter()))
            val_fraction = default_share(hash_fraction(text.encode()) for text in texts_of_all)
        dropped = Counter[str]()
        cut = 0
        texts: list[str] = []
        left = self.selection.characters
        for number, path in enumerate(self.paths):
            budget = left // (len(self.paths) - number)
            taken = 0
            for text in self._texts(path, dropped):
                if hash_fraction(text.encode()) < val_fraction:
                    continue
                if taken >= budget:
                    cut += 1
                    break
                texts.append(text)
                taken += len(text)
            left -= taken
        read = f"{len(texts):,} documents read"
        if cut:
            read += f", only the beginning of {cut:,} of {len(self.paths):,} files (--characters)"
        read += dropped_summary(dropped)
        if not texts:
            raise UserError(f'{self.name} has no documents ({read}): give JSON lines with a field "text".')
        return texts, read

    def _texts(self, path: Path, dropped: Counter[str]) -> Iterator[str]:
        """Yield the texts of a file, and count the lines that cannot be used."""
        for _, line in read_lines(path):
            if not line.strip():
                continue
            try:
                text = text_of(line)
            except Dropped as fault:
                dropped[fault.reason] += 1
                continue
            yield text

    def identity(self) -> str:
        """Return the hash of a folder's manifest, or of the names and lengths of JSON lines files, but not of their
        content. The hash has 10 hex digits; it is empty if there are no documents."""
        if self.folder is not None:
            return manifest_hash(self.folder)
        if not self.paths:
            return ""
        return identity_hash({"files": [[path.name, path.stat().st_size] for path in self.paths]})
