"""Convert matplotlib's SVG to an element for a page with several figures."""

from __future__ import annotations

import html
import io
import re

from matplotlib.figure import Figure

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial"
_NAMESPACES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'


def svg_element(canvas: Figure, prefix: str, label: str) -> str:
    """A drawn figure as an ``<svg>`` that scales with its box and uses the page's font.

    Args:
        prefix: prefix of its ids, which makes them unique on the page.
        label: the ``aria-label``.
    """
    opening, body = _parts(canvas, prefix, transparent=True)
    tag = f'<svg viewBox="{opening}" role="img" aria-label="{html.escape(label)}" {_NAMESPACES}>'
    return tag + body


def svg_file(canvas: Figure, prefix: str, label: str) -> str:
    """A drawn figure as a complete SVG file, with its size in points."""
    opening, body = _parts(canvas, prefix, transparent=False)
    width, height = opening.split()[2:]
    size = f'width="{width}pt" height="{height}pt" viewBox="{opening}"'
    head = f'<svg {size} role="img" aria-label="{html.escape(label)}" {_NAMESPACES}>'
    return f'<?xml version="1.0" encoding="utf-8"?>\n{head}{body}\n'


def _parts(canvas: Figure, prefix: str, *, transparent: bool) -> tuple[str, str]:
    """(viewBox, everything after the opening tag) of a figure's SVG."""
    out = io.StringIO()
    # Without metadata: a date, a version or a link would make equal figures differ.
    canvas.savefig(
        out,
        format="svg",
        transparent=transparent,
        metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")),
    )
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', svg)
    # Coordinates get two decimal places; numbers in labels are not changed.
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d+\.\d\d)\d+", r"\1", tag[0]), svg)
    svg = svg.replace("'DejaVu Sans'", _FONT)
    opening = re.match(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', svg)
    assert opening is not None, "matplotlib's SVG has a viewBox"
    return opening[1], re.sub(r"\n\s*", "\n", svg[opening.end() :]).strip()
