"""Draws images for TensorBoard: a statistic by layer and step, and attention between modalities by layer."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from mmqk.store import parsed_tag

# Statistics drawn by layer and step, and whether their scale is logarithmic. A statistic of pairs of modalities is
# drawn as its maximum over key modalities.
HEAT_MAPS = {"attn_logit_absmax": True, "attn_entropy": False, "q_norm": True, "k_norm": True}
MASS = "attn_mass"
# Maximum number of probes in an image; with more, every second probe is dropped.
COLUMNS = 200

_WIDTH, _ROW, _LEFT, _TOP, _BOTTOM, _RIGHT = 640, 18, 64, 26, 22, 96
# Dark blue through green to yellow with evenly rising lightness (five colors of viridis).
_COLORS = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], dtype=float)
_GRAY, _INK = (200, 200, 200), (40, 40, 40)


class History:
    """Stores the step of each probe and the values that the images show."""

    def __init__(self) -> None:
        self.probes: list[tuple[int, dict[str, float]]] = []
        self.seen = 0
        self._every = 1

    def add(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Store the values that the images show; return whether there were any."""
        wanted = {
            name: value
            for name, value in metrics.items()
            if name.startswith((*HEAT_MAPS, MASS))
            and (parsed := parsed_tag(name)).statistic in (*HEAT_MAPS, MASS)
            and parsed.head is None
            and parsed.layer is not None
        }
        if not wanted:
            return False
        # The newest probe is always stored. If thinning would drop it, the next probe replaces it.
        if self.probes and (self.seen - 1) % self._every:
            self.probes.pop()
        self.probes.append((step, wanted))
        self.seen += 1
        if len(self.probes) > COLUMNS:
            self.probes, self._every = self.probes[::2], 2 * self._every
        return True

    def heat_map(self, statistic: str, modality: str) -> NDArray[np.float64]:
        """Return a table (layers, probes) with NaN for missing values. The table has zero layers if no probe has a
        value."""
        cells: dict[tuple[int, int], float] = {}
        for column, (_, values) in enumerate(self.probes):
            for name, value in values.items():
                tag = parsed_tag(name)
                query = tag.pair[0] if tag.pair else tag.modality
                if tag.statistic == statistic and tag.layer is not None and query == modality:
                    at = (tag.layer, column)
                    cells[at] = float(np.maximum(cells.get(at, -math.inf), value))  # NaN if either is NaN
        layers = 1 + max((layer for layer, _ in cells), default=-1)
        table = np.full((layers, len(self.probes)), np.nan)
        for (layer, column), value in cells.items():
            table[layer, column] = value
        return table

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.probes]

    def mass(self, modalities: Sequence[str]) -> NDArray[np.float64]:
        """Return the shares of attention in the newest probe, (layers, query modalities, key modalities), with NaN
        for missing values."""
        values = self.probes[-1][1] if self.probes else {}
        parsed = [(parsed_tag(name), value) for name, value in values.items()]
        masses = [(tag, value) for tag, value in parsed if tag.statistic == MASS and tag.pair is not None]
        layers = 1 + max((tag.layer for tag, _ in masses if tag.layer is not None), default=-1)
        table = np.full((layers, len(modalities), len(modalities)), np.nan)
        for tag, value in masses:
            assert tag.pair is not None
            if set(tag.pair) <= set(modalities):
                table[tag.layer, modalities.index(tag.pair[0]), modalities.index(tag.pair[1])] = value
        return table


def draw_heat_map(table: NDArray[np.float64], steps: Sequence[int], title: str, logarithmic: bool) -> bytes:
    """Return a PNG: layers from bottom to top, probes from left to right, the color scale at the right; gray is
    NaN."""
    layers, columns = table.shape
    shown = np.where(np.isfinite(table), table, np.nan)
    if logarithmic:
        shown = np.log(np.where(shown > 0, shown, np.nan))
    known = shown[np.isfinite(shown)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    row = max(6, min(_ROW, 360 // layers))
    height = row * layers
    picture = Image.new("RGB", (_LEFT + _WIDTH + _RIGHT, _TOP + height + _BOTTOM), "white")
    across = np.minimum(np.arange(_WIDTH) * columns // _WIDTH, columns - 1)
    cells = _colored((shown - low) / ((high - low) or 1.0))[::-1][np.arange(height) // row][:, across]
    picture.paste(Image.fromarray(cells), (_LEFT, _TOP))
    scale = _colored(np.linspace(1, 0, height)[:, None].repeat(14, 1))
    picture.paste(Image.fromarray(scale), (_LEFT + _WIDTH + 10, _TOP))
    draw, font = ImageDraw.Draw(picture), _font()
    draw.text((_LEFT, 6), title, _INK, font)
    every = -(-layers * 14 // height)
    for layer in range(0, layers, every):
        y = _TOP + height - row * layer - row // 2
        draw.text((_LEFT - 6, y), f"layer {layer}", _INK, font, anchor="rm")
    for column in sorted({0, columns // 2, columns - 1}):
        x = _LEFT + (2 * column + 1) * _WIDTH // (2 * columns)
        draw.text((x, _TOP + height + 4), str(steps[column]), _INK, font, anchor="ma")
    for value, y in ((high, _TOP + 6), (low, _TOP + height - 6)):
        shown_value = math.exp(value) if logarithmic else value
        draw.text((_LEFT + _WIDTH + 30, y), f"{shown_value:.3g}" if known.size else "", _INK, font, anchor="lm")
    return _png(picture)


def draw_mass(table: NDArray[np.float64], modalities: Sequence[str], title: str) -> bytes:
    """Return a PNG with a matrix per layer: queries down, keys across; each row shows the shares of attention."""
    cell, margin, label, per_row = 46, 18, 52, 6
    layers, n, _ = table.shape
    block = (label + n * cell + margin, margin + 16 + n * cell + margin)
    across = min(per_row, layers)
    size = (margin + across * block[0], _TOP + 12 + -(-layers // per_row) * block[1])
    picture = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(picture), _font()
    draw.text((margin, 6), title, _INK, font)
    colors = _colored(table.reshape(layers, -1)).reshape(layers, n, n, 3)
    for layer in range(layers):
        x0 = margin + (layer % per_row) * block[0] + label
        y0 = _TOP + 12 + (layer // per_row) * block[1] + margin + 16
        draw.text((x0, y0 - 32), f"layer {layer}", _INK, font)
        for i, name in enumerate(modalities):
            draw.text((x0 - 6, y0 + i * cell + cell // 2), name[:7], _INK, font, anchor="rm")
            draw.text((x0 + i * cell + cell // 2, y0 - 9), name[:7], _INK, font, anchor="mm")
            for j in range(n):
                value, color = table[layer, i, j], tuple(int(c) for c in colors[layer, i, j])
                at = (x0 + j * cell, y0 + i * cell)
                draw.rectangle((*at, at[0] + cell - 2, at[1] + cell - 2), fill=color)
                ink = "black" if np.isnan(value) or value > 0.55 else "white"
                text = "" if np.isnan(value) else f"{value:.2f}"
                draw.text((at[0] + cell // 2 - 1, at[1] + cell // 2 - 1), text, ink, font, anchor="mm")
    return _png(picture)


def _colored(share: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return the RGB colors of numbers from 0 to 1; gray for NaN."""
    known = np.nan_to_num(share).clip(0, 1) * (len(_COLORS) - 1)
    low = np.minimum(known.astype(int), len(_COLORS) - 2)
    mixed = _COLORS[low] + (known - low)[..., None] * (_COLORS[low + 1] - _COLORS[low])
    mixed[np.isnan(share)] = _GRAY
    return mixed.round().astype(np.uint8)


@cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(12)


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    # The run waits for the image, and PIL's default compression level takes several times as long.
    picture.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
