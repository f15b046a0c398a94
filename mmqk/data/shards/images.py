"""Convert any image file to a square RGB image, or drop it with one of a few fixed reasons.

```
bytes ── open ── pixel cap ── draft (JPEG) ── decode ── upright ── 8 bit ── resize ── white background ──> RGB
```

Needs Pillow and numpy only.
"""

from __future__ import annotations

import io
import math
import warnings
from typing import Literal

import numpy as np
from PIL import Image, ImageOps

Fit = Literal["crop", "pad", "stretch"]

EMPTY = "image file is empty"
UNKNOWN = "not an image of a known format"
TOO_LARGE = "image has too many pixels"
BROKEN = "image cannot be decoded"
NOT_FINITE = "image has infinite or undefined pixels"

MAX_PIXELS = 2**26
# Other formats of Pillow are excluded: EPS starts programs, ICO may contain larger images than its header states,
# and support of AVIF depends on the Pillow version.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")

# An image is shrunk in two stages. First, fast integer reductions (JPEG's DCT scaling, a box filter) shrink it, but
# leave it at least this many times as large as the target. Then the antialiased bicubic filter shrinks it to the
# target size. At 3 the mean difference from the exact result is below one gray level for a photo.
_GAP = 3.0
_PNG = b"\x89PNG\r\n\x1a\n"
# The optional chunks of a PNG that its pixels or its orientation depend on.
_PNG_NEEDED = (b"tRNS", b"acTL", b"fcTL", b"fdAT", b"eXIf")


class Dropped(Exception):
    """A sample that cannot be used.

    Attributes:
        reason: a fixed phrase, by which dropped samples are counted.
    """

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def load_image(content: bytes, size: int, fit: Fit = "crop", max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode an image file and fit it into a square of `size` pixels. An RGB image of that size keeps its pixels.

    The Exif orientation is applied, transparent parts become white, and only the first frame of an animation is used.
    Gray images of more than 8 bits are scaled to 8 bits, not clipped. Their range is 0 to 65535 for integers; for
    floats it is 0 to 1, or 0 to 255 if a value is outside 0 to 1. If a value is outside these ranges, the range is
    from the lowest to the highest value. Color profiles and texts are ignored, however large.

    Args:
        content: the file's bytes; the format is detected from them.
        size: side of the result in pixels.
        fit: "crop" scales the shorter side to `size` and keeps the center, "pad" scales the longer side and
            adds white, "stretch" scales both.
        max_pixels: images with more pixels (width x height in the header) are dropped without being decoded.
            Pillow's own cap applies too: twice `PIL.Image.MAX_IMAGE_PIXELS`, 179 million by default.

    Returns:
        The image as RGB, size x size pixels.

    Raises:
        Dropped: the file is empty, not an image, too large, damaged or truncated.
    """
    if not content:
        raise Dropped(EMPTY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of odd metadata, and of sizes that this function checks
        try:
            with open_image(content) as image:
                return _fitted(_decoded(image, size, fit, max_pixels), size, fit)
        except Image.UnidentifiedImageError:
            raise Dropped(UNKNOWN) from None
        except Image.DecompressionBombError:
            raise Dropped(TOO_LARGE) from None
        except (Dropped, MemoryError):
            raise
        except Exception:  # for damaged files Pillow raises OSError, ValueError, SyntaxError, struct.error and others
            raise Dropped(BROKEN) from None


def open_image(content: bytes) -> Image.Image:
    """Open an image file of one of `FORMATS` and read its header."""
    if content.startswith(_PNG):
        content = _without_metadata(content)
    return Image.open(io.BytesIO(content), formats=FORMATS)


def on_white(image: Image.Image) -> Image.Image:
    """Return the image as RGB; transparent parts become white."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


def _decoded(image: Image.Image, size: int, fit: Fit, max_pixels: int) -> Image.Image:
    """Return the image with its Exif orientation applied, in a mode that can be filtered: L, LA, RGB or RGBA."""
    width, height = image.size
    if width * height > max_pixels:
        raise Dropped(TOO_LARGE)
    side = max(width, height) if fit == "pad" else min(width, height)
    if side > size:
        # Only JPEG supports `draft`: its decoder can halve an image up to three times at almost no cost.
        shrink = min(1.0, _GAP * size / side)
        image.draft(None, (math.ceil(width * shrink), math.ceil(height * shrink)))
    image.load()
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:  # damaged metadata; Pillow has rotated the image before it rewrites the metadata
        pass
    return _eight_bit(image)


def _without_metadata(png: bytes) -> bytes:
    """Return a PNG without its color profile, texts and other chunks that no pixel needs.

    Pillow refuses the whole file if one of them is damaged, or large after decompression.
    """
    place, kept = len(_PNG), [_PNG]
    while place + 12 <= len(png):
        end, kind = place + 12 + int.from_bytes(png[place : place + 4]), png[place + 4 : place + 8]
        if end > len(png) or kind == b"IEND":
            break
        if not kind[0] & 0x20 or kind in _PNG_NEEDED:  # bit 5 marks a chunk that a decoder may ignore
            kept.append(png[place:end])
        place = end
    return b"".join([*kept, png[place:]])


def _eight_bit(image: Image.Image) -> Image.Image:
    if image.mode[0] in "IF":
        return _scaled(image)
    if image.has_transparency_data:
        return image.convert("RGBA")
    return image if image.mode in ("L", "RGB") else image.convert("L" if image.mode == "1" else "RGB")


def _scaled(image: Image.Image) -> Image.Image:
    deep = np.asarray(image)
    values = deep.astype(np.float32)
    low, high = float(values.min()), float(values.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise Dropped(NOT_FINITE)
    for top in (1.0, 255.0) if image.mode == "F" else (65535.0,):
        if low >= 0 and high <= top:
            low, high = 0.0, top
            break
    values = (values - low) * (255 / ((high - low) or 1))
    gray = Image.fromarray(values.round().astype(np.uint8))
    if (clear := image.info.get("transparency")) is None:
        return gray
    return Image.merge("LA", (gray, Image.fromarray(np.where(deep == clear, 0, 255).astype(np.uint8))))


def _fitted(image: Image.Image, size: int, fit: Fit) -> Image.Image:
    width, height = image.size
    box, target = (0, 0, width, height), (size, size)
    if fit == "crop":
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        box = (left, top, left + side, top + side)
    elif fit == "pad":
        scale = size / max(width, height)
        target = (max(1, round(width * scale)), max(1, round(height * scale)))
    # Transparent colors are filtered with their alpha; the white background is added after the resize.
    scaled = on_white(image.resize(target, Image.Resampling.BICUBIC, box, reducing_gap=_GAP))
    if target == (size, size):
        return scaled
    ground = Image.new("RGB", (size, size), "white")
    ground.paste(scaled, ((size - target[0]) // 2, (size - target[1]) // 2))
    return ground
