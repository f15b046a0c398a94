"""Numbers as every command's progress says them."""

from __future__ import annotations


def clock(seconds: float) -> str:
    """Minutes and seconds as m:ss; a negative time is 0:00."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"
