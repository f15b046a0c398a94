"""From matplotlib's SVG to an element that can stand in a page beside others."""

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
        prefix: what its ids begin with, so that they are unique on the page.
        label: for readers who do not see it.
    """
    out = io.StringIO()
    # Every entry of its metadata (a date, a version, a link) would make equal figures differ.
    canvas.savefig(
        out, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
    )
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', svg)
    svg = re.sub(r"(\d+\.\d\d)\d+", r"\1", svg)
    svg = svg.replace("'DejaVu Sans'", _FONT)
    opening = re.match(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', svg)
    assert opening is not None, "matplotlib's SVG has a viewBox"
    tag = f'<svg viewBox="{opening[1]}" role="img" aria-label="{html.escape(label)}" {_NAMESPACES}>'
    return re.sub(r"\n\s*", "\n", tag + svg[opening.end() :]).strip()
