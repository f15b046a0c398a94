"""Format numbers and words for a page."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from mmqk.store.formatting import plain
from mmqk.store.formatting import plural as plural  # re-exported

DASH = "–"
# Numbers from this power of ten on are printed with an exponent.
LARGEST_POWER = 15


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


def count(value: float) -> str:
    """Return a large number in short form: ``950``, ``12k``, ``2.36M``, ``1.2B``."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{plain(value / size)}{letter}"
    return f"{value:.0f}"


def slug(text: str) -> str:
    """Return the text in a form that can be part of an HTML id."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")
