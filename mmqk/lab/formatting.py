"""Format numbers and text for pages, and render their templates; text is escaped."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmqk.store.formatting import plain
from mmqk.store.formatting import plural as plural  # re-exported

DASH = "–"
# Numbers from this power of ten on are printed with an exponent.
LARGEST_POWER = 15
TEMPLATES = Path(__file__).parent / "page" / "templates"
# Markup anywhere in a line of GitHub's Markdown; the dollar begins mathematics, the ampersand an entity.
_MARK = re.compile(r"[\\`*_\[\]<>|~$&]")
# Markup at the beginning of a line: heading, list, rule.
_LINE_MARK = re.compile(r"^(\s*\d{0,9})([-+=#](?=[-+=#\s]|$)|(?<=\d)[.)](?=\s|$))")
_INDENT = re.compile(r"^( *\t\s*|\s{4,})(?=\S)")
_BREAK = re.compile(r"[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]")


def number(value: float, digits: int = 3) -> str:
    """Return a number with ``digits`` significant digits; "∞" or "-∞" if infinite, "not measured" for NaN."""
    if math.isnan(value):
        return "not measured"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    rounded = round(value, digits - 1 - size)
    # Rounding may add a digit: 9.996 becomes 10.0.
    size = math.floor(math.log10(abs(rounded)))
    if not -4 <= size < LARGEST_POWER:
        return f"{value:.{digits - 1}e}"
    if size >= digits - 1:
        return f"{rounded:,.0f}"
    return f"{rounded:.{digits - 1 - size}f}"


def exp(value: float) -> float:
    """Return the exponential of a number; infinite if it exceeds the largest float."""
    return math.inf if value > 709 else math.exp(value)


def decimals(error: float) -> int:
    """Return how many decimals a number with this error should have.

    The error is shown with two significant digits if these digits are below 35, and otherwise with one: 0.031, but
    0.04 (Review of Particle Physics, section 5.3). The number gets as many decimals as its error.
    """
    if not (math.isfinite(error) and error > 0):
        return 2
    size = math.floor(math.log10(error))
    return -size + (error / 10**size < 3.5)


def fixed(value: float, places: int, sign: str = "-") -> str:
    """Return a number with this many decimals; a negative number of places rounds to tens, hundreds and so on."""
    rounded = round(value, places) + 0.0  # no "-0.00"
    return f"{rounded:{sign},.{max(0, places)}f}"


def nats(value: float) -> str:
    """Return a loss or an entropy in nats, with two decimals."""
    return f"{value:.2f}" if math.isfinite(value) else number(value)


def listed(items: Sequence[str], last: str = "and") -> str:
    """Join words as ``a, b and c``."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} {last} {items[-1]}"


def capital(text: str) -> str:
    """Return the text with a capital first letter."""
    return text[:1].upper() + text[1:]


def duration(seconds: float) -> str:
    """Format a duration: ``42 s``, ``3 min 05 s``, ``17 h 04 min``."""
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{round(whole / 60) // 60} h {round(whole / 60) % 60:02d} min"


def short(value: float, _position: float = 0) -> str:
    """Return a number in short form, also for an axis: ``0.003``, ``1e-4``, ``250``, ``1.5k``, ``2.36M``."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e12:
            return f"{plain(value / size)}{letter}"
    return f"{value:.0e}".replace("e-0", "e-") if 0 < abs(value) < 1e-3 else f"{value:g}".replace("e+", "e")


def slug(text: str) -> str:
    """Return the text in a form that can be part of an HTML id."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")


# Templates ----------------------------------------------------------------------------------------------------------


def render(
    name: str,
    content: Mapping[str, Any],
    folder: Path = TEMPLATES,
    filters: Mapping[str, Callable[..., Any]] | None = None,
) -> str:
    """Render a template of a folder; ``filters`` are available in addition to the filters of this package."""
    import jinja2  # verdicts need the numbers alone
    import yaml

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=name.endswith(".html"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.globals |= {"captions": yaml.safe_load(source("captions.yaml")), "source": source}
    environment.filters |= {"shade": shade, **(filters or {})}
    if name.endswith(".md"):
        # Every expression is escaped unless the template marks it as raw, as in HTML.
        environment.finalize = markdown
        environment.filters |= {"raw": Raw, "code": code, "fenced": fenced}
    return environment.get_template(name).render(content)


def source(name: str) -> str:
    """Return the text of a file beside the templates, such as a style sheet."""
    return (TEMPLATES / name).read_text(encoding="utf-8").strip()


def shade(color: str) -> str:
    """Return the color of an arm on the page: black becomes white in dark mode."""
    return "var(--black)" if color == "#000000" else color


class Raw(str):
    """Text that is already Markdown and is not escaped."""


def markdown(text: object) -> str:
    """Return the text as one line, escaped for Markdown; it can be used in a table, a link or an image."""
    if isinstance(text, Raw):
        return text
    return _LINE_MARK.sub(r"\1\\\2", _MARK.sub(r"\\\g<0>", _one_line(text)))


def code(text: object) -> Raw:
    """Return the text as a code span that is also valid in a table. Its fence is longer than any backtick sequence in
    the text."""
    plain = _one_line(text).replace("|", "\\|")
    fence = "`" * (_longest(plain) + 1)
    return Raw(f"{fence} {plain} {fence}" if "`" in plain else f"{fence}{plain}{fence}")


def fenced(text: object) -> Raw:
    """Return the text as a code block."""
    fence = "`" * max(3, _longest(str(text)) + 1)
    return Raw(f"{fence}\n{text}\n{fence}")


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]], rest: str = "--:") -> str:
    """Return a table in Markdown; the columns after the first are aligned by ``rest``."""
    lines = [heads, ["---", *[rest] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _one_line(text: object) -> str:
    """Return the text without line breaks and without an indent that would make it a code block."""
    plain = str(text)
    if _BREAK.search(plain):
        plain = " ".join(line.strip() for line in plain.splitlines())
    return _INDENT.sub(" ", plain)


def _longest(text: str) -> int:
    """Return the length of the longest sequence of backticks."""
    return max(map(len, re.findall("`+", text)), default=0)
