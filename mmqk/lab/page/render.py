"""Render the templates; text is escaped."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2

TEMPLATES = Path(__file__).parent / "templates"
# Markup anywhere in a line of GitHub's Markdown; the dollar begins mathematics, the ampersand an entity.
_MARK = re.compile(r"[\\`*_\[\]<>|~$&]")
# Markup at the beginning of a line: heading, list, rule.
_LINE_MARK = re.compile(r"^(\s*\d{0,9})([-+=#](?=[-+=#\s]|$)|(?<=\d)[.)](?=\s|$))")
_INDENT = re.compile(r"^( *\t\s*|\s{4,})(?=\S)")
_BREAK = re.compile(r"[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]")


def render(
    name: str,
    content: Mapping[str, Any],
    folder: Path = TEMPLATES,
    filters: Mapping[str, Callable[..., Any]] | None = None,
) -> str:
    """Render a template of a folder; ``filters`` are available in addition to the filters of this package."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=name.endswith(".html"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=False,
        keep_trailing_newline=True,
    )
    environment.filters |= {"shade": shade, **(filters or {})}
    if name.endswith(".md"):
        # Every expression is escaped unless the template marks it as raw, as in HTML.
        environment.finalize = markdown
        environment.filters |= {"raw": Raw, "code": code, "fenced": fenced}
    return environment.get_template(name).render(content)


def css() -> str:
    """Return the style sheet of the page."""
    return _joined("vendor/uPlot.min.css", "page.css")


def scripts() -> str:
    """Return the library that draws the charts, followed by the script of the page."""
    return _joined("vendor/uPlot.iife.min.js", "page.js")


def _joined(*files: str) -> str:
    return "\n".join((TEMPLATES / name).read_text(encoding="utf-8").strip() for name in files)


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


def _one_line(text: object) -> str:
    """Return the text without line breaks and without an indent that would make it a code block."""
    plain = str(text)
    if _BREAK.search(plain):
        plain = " ".join(line.strip() for line in plain.splitlines())
    return _INDENT.sub(" ", plain)


def _longest(text: str) -> int:
    """Return the length of the longest sequence of backticks."""
    return max(map(len, re.findall("`+", text)), default=0)
