"""Templates, and how text gets into them: escaped, with its numbers linked to the runs they came from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from mmqk.analysis.words import slug

TEMPLATES = Path(__file__).parent / "templates"
# A number that stands alone: not the 2 of C2, a part of a word or a version, or the level of an interval.
_NUMBER = re.compile(
    r"(?<![\w.#/-])[×+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[+-]?\d+)?(?![\w/]|\.\d|-[a-zA-Z]| % interval)"
)


def render(name: str, content: Mapping[str, Any]) -> str:
    """A template of the package with its content."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=name.endswith(".html"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=False,
        keep_trailing_newline=True,
    )
    environment.filters |= {"md": markdown, "linked": linked, "claims": claims, "slug": slug}
    return environment.get_template(name).render(content)


def css() -> str:
    """The page's style sheet."""
    return (TEMPLATES / "page.css").read_text(encoding="utf-8").strip()


def markdown(text: object) -> str:
    """Text that Markdown leaves as it is, also inside a table."""
    escaped = str(text)
    for character in "\\`*_<>|":
        escaped = escaped.replace(character, f"\\{character}")
    return escaped


def linked(text: object, href: str) -> Markup:
    """Text whose numbers are links."""
    out, last, plain = Markup(), 0, str(text)
    if not href:
        return escape(plain)
    for match in _NUMBER.finditer(plain):
        out += escape(plain[last : match.start()])
        out += Markup('<a class="n" href="{}">{}</a>').format(href, match[0])
        last = match.end()
    return out + escape(plain[last:])


def claims(text: object, ids: Mapping[str, str]) -> Markup:
    """Text in which the names of claims are links to their sections."""
    if not ids:
        return escape(str(text))
    names = "|".join(re.escape(name) for name in sorted(ids, key=len, reverse=True))
    out, last, plain = Markup(), 0, str(text)
    for match in re.finditer(rf"(?<!\w)(?:{names})(?!\w)", plain):
        out += escape(plain[last : match.start()])
        out += Markup('<a class="n" href="#claim-{}">{}</a>').format(ids[match[0]], match[0])
        last = match.end()
    return out + escape(plain[last:])
