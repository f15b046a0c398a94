"""Check images of every size and mode against results computed without Pillow's conversions."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from mmqk.data.shards import images
from mmqk.data.shards.images import Dropped, load_image, on_white
from tests.data.tars import encoded


def noise(width: int, height: int, channels: int = 3, seed: int = 0) -> Image.Image:
    """Return a smooth random image whose neighboring pixels are similar, as in a photo."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, channels), dtype=np.uint8)
    return Image.fromarray(coarse.squeeze()).resize((width, height), Image.Resampling.BICUBIC)


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


def reason(content: bytes, **options: Any) -> str:
    with pytest.raises(Dropped) as caught:
        load_image(content, **{"size": 64, **options})
    assert str(caught.value) == caught.value.reason
    return caught.value.reason


def png(header: tuple[int, ...], data: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """Return a PNG made from its raw parts."""
    parts = [(b"IHDR", struct.pack(">IIBBBBB", *header)), *chunks, (b"IDAT", zlib.compress(data)), (b"IEND", b"")]
    body = (struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d)) for t, d in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def test_images_of_the_right_size_come_through_bit_for_bit() -> None:
    rgb, rgba, grey = noise(64, 64), noise(64, 64, 4), noise(64, 64, 1)
    for fit in ("crop", "pad", "stretch"):
        for file_format in ("PNG", "BMP", "TIFF"):
            assert (pixels(load_image(encoded(rgb, file_format), 64, fit)) == pixels(rgb)).all()  # type: ignore[arg-type]
        webp = encoded(rgb, "WEBP", lossless=True)
        assert (pixels(load_image(webp, 64, fit)) == pixels(rgb)).all()  # type: ignore[arg-type]
        three = np.repeat(pixels(grey)[:, :, None], 3, axis=2)
        assert (pixels(load_image(encoded(grey, "PNG"), 64, fit)) == three).all()  # type: ignore[arg-type]
    # load_image only puts images of this size on white.
    for image in (rgba, rgb.quantize(16), noise(64, 64, 2), rgb.convert("1")):
        assert (pixels(load_image(encoded(image, "PNG"), 64)) == pixels(on_white(image))).all()
    # A JPEG of this size is decoded in full, without draft mode.
    jpeg = encoded(rgb, "JPEG")
    assert (pixels(load_image(jpeg, 64)) == pixels(Image.open(io.BytesIO(jpeg)))).all()
    assert (pixels(load_image(jpeg, 63)) != pixels(Image.open(io.BytesIO(jpeg)).crop((0, 0, 63, 63)))).any()


def test_crop_keeps_the_centre_of_the_longer_side() -> None:
    # Three squares side by side, of which only the middle one may be visible.
    wide = np.concatenate([np.full((50, 50, 3), c) for c in (10, 120, 240)], axis=1).astype(np.uint8)
    for array in (wide, wide.transpose(1, 0, 2)):
        square = pixels(load_image(encoded(Image.fromarray(np.ascontiguousarray(array)), "PNG"), 20))
        assert (square[3:-3, 3:-3] == 120).all()
    # Without scaling the crop is exact; if the number of rows to cut is odd, the far end loses one row more.
    image = noise(64, 69)
    assert (pixels(load_image(encoded(image, "PNG"), 64)) == pixels(image)[2:66]).all()


def test_scaling_down_is_antialiased() -> None:
    # Stripes of one pixel, which are too fine for the result, become a uniform gray.
    stripes = np.zeros((640, 640), dtype=np.uint8)
    stripes[:, ::2] = 255
    grey = pixels(load_image(encoded(Image.fromarray(stripes), "PNG"), 64))
    assert abs(grey - 127.5)[:, 2:-2].max() <= 2
    plain = Image.fromarray(stripes).resize((64, 64), Image.Resampling.NEAREST)
    assert abs(pixels(plain) - 127.5).max() > 100  # the control: plain subsampling


@pytest.mark.parametrize("size", [(1024, 768), (700, 1500), (250, 200)])
def test_draft_mode_is_near_the_full_decode(size: tuple[int, int]) -> None:
    grain = np.random.default_rng(1).normal(0, 12, (size[1], size[0], 3))
    photo = Image.fromarray((pixels(noise(*size)) + grain).clip(0, 255).astype(np.uint8))
    content = encoded(photo, "JPEG", quality=92)
    for fit in ("crop", "stretch"):
        whole = Image.open(io.BytesIO(content)).convert("RGB")
        if fit == "crop":
            side, (width, height) = min(size), size
            left, top = (width - side) // 2, (height - side) // 2
            whole = whole.crop((left, top, left + side, top + side))
        plain = whole.resize((64, 64), Image.Resampling.BICUBIC)
        difference = abs(pixels(load_image(content, 64, fit)) - pixels(plain))  # type: ignore[arg-type]
        assert difference.mean() < 1.0 and np.percentile(difference, 99) <= 4
        # An offset of one pixel would be detected.
        assert abs(np.roll(pixels(plain), 1, 1) - pixels(plain)).mean() > 2


def test_one_bit_and_palettes() -> None:
    half = Image.new("1", (128, 128))
    half.paste(1, (64, 0, 128, 128))
    for file_format in ("PNG", "TIFF", "BMP"):
        square = pixels(load_image(encoded(half, file_format), 64))
        assert (square[:, :29] == 0).all() and (square[:, 35:] == 255).all()
    palette = Image.new("P", (100, 100), 1)
    palette.putpalette([9, 8, 7, 200, 100, 50, 0, 0, 255])
    palette.paste(2, (0, 0, 100, 50))
    for file_format in ("PNG", "GIF", "BMP", "TIFF"):
        square = pixels(load_image(encoded(palette, file_format), 64))
        assert (square[:28] == (0, 0, 255)).all() and (square[36:] == (200, 100, 50)).all()
        # A transparent palette entry shows white, not its color.
        if file_format in ("PNG", "GIF"):
            square = pixels(load_image(encoded(palette, file_format, transparency=1), 64))
            assert (square[:28] == (0, 0, 255)).all() and (square[36:] == 255).all()
    # A palette with half-transparent entries, each with 8 bits of alpha.
    square = pixels(load_image(encoded(palette, "PNG", transparency=bytes([255, 128, 255])), 64))
    expected = np.array([200, 100, 50]) * 128 / 255 + 255 - 128
    assert abs(square[40] - expected).max() <= 1


@pytest.mark.parametrize("size", [64, 200])
def test_alpha_shows_white(size: int) -> None:
    for alpha in (0, 1, 77, 255):
        color = np.array([200, 0, 30])
        expected = color * alpha / 255 + 255 - alpha
        rgba = Image.new("RGBA", (size, size), (*color.tolist(), alpha))
        for options in ({"file_format": "PNG"}, {"file_format": "WEBP", "lossless": True, "exact": True}):
            square = load_image(encoded(rgba, **options), 64)  # type: ignore[arg-type]
            assert abs(pixels(square) - expected).max() <= 1
        la = Image.new("LA", (size, size), (40, alpha))
        assert abs(pixels(load_image(encoded(la, "PNG"), 64)) - (40 * alpha / 255 + 255 - alpha)).max() <= 1
    # Colors of transparent pixels do not bleed into their neighbors when the image is filtered.
    array = np.zeros((size, size, 4), dtype=np.uint8)
    array[:, : size // 2] = (0, 255, 0, 0)
    array[:, size // 2 :] = (255, 0, 0, 255)
    square = pixels(load_image(encoded(Image.fromarray(array), "PNG"), 64))
    assert (square[..., 1] == square[..., 2]).all() and (square[:, :29] == 255).all()
    bled = pixels(Image.fromarray(array).convert("RGB").resize((63, 63), Image.Resampling.BICUBIC))
    assert (bled[..., 1] != bled[..., 2]).any()
    # One color is declared transparent, in RGB and in grayscale images (tRNS).
    for mode, clear in (("RGB", (1, 2, 3)), ("L", 9)):
        image = Image.new(mode, (size, size), clear)
        assert pixels(load_image(encoded(image, "PNG", transparency=clear), 64)).min() == 255
        assert pixels(load_image(encoded(image, "PNG"), 64)).max() < 10


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_cmyk_as_another_decoder_sees_it() -> None:
    decode_jpeg = pytest.importorskip("torchvision.io").decode_jpeg

    inks = Image.merge("CMYK", [noise(96, 96, 1, seed) for seed in range(4)])
    jpeg = encoded(inks, "JPEG", quality=100, subsampling=0)
    assert b"Adobe" in jpeg[:200]  # this marker means that the inks are stored inverted
    data = torch.frombuffer(bytearray(jpeg), dtype=torch.uint8)
    expected = decode_jpeg(data, "RGB").permute(1, 2, 0).numpy().astype(int)
    got = pixels(load_image(jpeg, 96))
    assert abs(got - expected).mean() < 2
    assert abs(255 - got - expected).mean() > 20  # the control: without the inversion the colors differ
    # A TIFF is not inverted, and its colors follow from the inks by this formula.
    c, m, y, k = (pixels(channel) / 255 for channel in inks.split())
    formula = 255 * np.stack([(1 - ink) * (1 - k) for ink in (c, m, y)], axis=2)
    assert abs(pixels(load_image(encoded(inks, "TIFF"), 96)) - formula).max() <= 2


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    ramp = np.linspace(0, 65535, 64).astype(np.uint16)
    deep = np.tile(ramp, (64, 1))
    expected = np.round(deep / 257)
    for file_format in ("PNG", "TIFF"):
        square = pixels(load_image(encoded(Image.fromarray(deep), file_format), 64))
        assert (square == expected[:, :, None]).all()
    clipped = pixels(Image.fromarray(deep).convert("L"))
    assert (clipped == 255).mean() > 0.9  # the control: Pillow's own conversion
    # A dark image stays dark, whatever its own maximum.
    dark = Image.fromarray(np.full((90, 90), 300, dtype=np.uint16))
    assert (pixels(load_image(encoded(dark, "PNG"), 64)) == 1).all()
    whole_numbers = Image.fromarray(deep.astype(np.int32))
    assert (pixels(load_image(encoded(whole_numbers, "TIFF"), 64)) == expected[:, :, None]).all()
    beyond = Image.fromarray((deep.astype(np.int32) - 30000) * 1000)
    square = pixels(load_image(encoded(beyond, "TIFF"), 64))
    assert abs(square - expected[:, :, None]).max() <= 1
    # Build two images from raw bytes: 16-bit grayscale with one transparent value, and 16-bit color.
    rows = b"".join(b"\0" + struct.pack(">64H", *([500] * 32 + [40000] * 32)) for _ in range(64))
    square = pixels(load_image(png((64, 64, 16, 0, 0, 0, 0), rows, (b"tRNS", b"\x01\xf4")), 64))
    assert (square[:, :32] == 255).all() and (square[:, 32:] == round(40000 / 257)).all()
    rows = (b"\0" + struct.pack(">3H", 65535, 25700, 0) * 64) * 64
    assert abs(pixels(load_image(png((64, 64, 16, 2, 0, 0, 0), rows), 64)) - (255, 100, 0)).max() <= 1


def test_floats_are_scaled_not_clipped() -> None:
    ramp = np.tile(np.linspace(0, 1, 64, dtype=np.float32), (64, 1))
    expected = np.round(ramp * 255)[:, :, None]
    for scale, shift in ((1, 0), (255, 0), (1e6, -3e5)):
        square = pixels(load_image(encoded(Image.fromarray(ramp * np.float32(scale) + shift), "TIFF"), 64))
        assert abs(square - expected).max() <= 1
    for bad in (np.nan, np.inf):
        broken = ramp.copy()
        broken[3, 3] = bad
        assert reason(encoded(Image.fromarray(broken), "TIFF")) == images.NOT_FINITE
    assert (pixels(load_image(encoded(Image.fromarray(ramp * 0 + 7000), "TIFF"), 64)) == 0).all()


@pytest.mark.parametrize("file_format", ["WEBP", "GIF", "PNG"])
def test_first_frame_of_an_animation(file_format: str) -> None:
    frames = [Image.new("RGB", (80, 80), color) for color in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if file_format == "WEBP" else {}
    content = encoded(frames[0], file_format, save_all=True, append_images=frames[1:], **options)
    with Image.open(io.BytesIO(content)) as opened:
        assert getattr(opened, "n_frames", 1) == 3
    assert (pixels(load_image(content, 64)) == (255, 0, 0)).all()


@pytest.mark.parametrize("orientation", range(2, 9))
def test_exif_orientation(orientation: int) -> None:
    upright = noise(150, 90)
    # The image as the camera stores it: the inverse of the rotation and reflection that the Exif standard defines for
    # this tag.
    a = pixels(upright).astype(np.uint8)
    stored = {
        2: a[:, ::-1], 3: a[::-1, ::-1], 4: a[::-1], 5: a.transpose(1, 0, 2),
        6: np.rot90(a), 7: np.rot90(a, 2).transpose(1, 0, 2), 8: np.rot90(a, -1),
    }[orientation]  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.ascontiguousarray(stored))
    expected = pixels(load_image(encoded(upright, "PNG"), 48, "stretch"))
    for file_format, options in (("PNG", {}), ("WEBP", {"lossless": True}), ("JPEG", {"quality": 98})):
        with_tag, without = (encoded(image, file_format, **options, **tag) for tag in ({"exif": exif}, {}))
        assert abs(pixels(load_image(with_tag, 48, "stretch")) - expected).mean() < 1.5, file_format
        assert abs(pixels(load_image(without, 48, "stretch")) - expected).mean() > 5  # the control


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def packed(megabytes: int) -> bytes:
    """Return zlib data that expand to this size."""
    deflate = zlib.compressobj()
    return b"".join(deflate.compress(b"a" * 10**6) for _ in range(megabytes)) + deflate.flush()


@pytest.mark.parametrize("place", [b"IDAT", b"IEND"])  # before the pixels, and after them
def test_large_or_damaged_metadata_of_a_png_do_not_cost_the_picture(place: bytes) -> None:
    image = noise(64, 64)
    whole = encoded(image, "PNG")
    at = whole.index(place) - 4
    for chunks in (
        chunk(b"iCCP", b"p\0\0" + packed(2)),
        chunk(b"zTXt", b"k\0\0" + packed(5)),
        chunk(b"eXIf", b"MM\0*\0\0\0\x08" + b"x" * 5_000_000),
        chunk(b"tEXt", b"interlace\0yes"),  # Pillow stores texts and its own settings in one table
        chunk(b"tIME", b"\7\xd0\1\1\0\0\0")[:-4] + b"sum?",
    ):
        assert (pixels(load_image(whole[:at] + chunks + whole[at:], 64)) == pixels(image)).all(), chunks[:40]
    # The controls: Pillow alone refuses the first of these files, and damaged pixels are not used.
    with pytest.raises(ValueError, match="too large"):
        Image.open(io.BytesIO(whole[:at] + chunk(b"iCCP", b"p\0\0" + packed(2)) + whole[at:])).load()
    damaged = bytearray(whole)
    damaged[whole.index(b"IDAT") + 200] ^= 255
    damaged[at:at] = chunk(b"iCCP", b"p\0\0" + packed(2))
    assert reason(bytes(damaged)) == images.BROKEN


def test_pixel_cap_comes_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    small = encoded(noise(200, 100), "JPEG")
    assert load_image(small, 64, max_pixels=20000).size == (64, 64)
    with monkeypatch.context() as patched:
        patched.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
        for side in (8193, 12000, 60000):  # Pillow warns about the second, and refuses the third
            assert reason(png((side, 8192, 8, 2, 0, 0, 0), b"\0" * 10**6)) == images.TOO_LARGE
        assert reason(small, max_pixels=19999) == images.TOO_LARGE
    assert reason(png((8192, 8192, 8, 2, 0, 0, 0), b"\0" * 10**6)) == images.BROKEN  # decoded at the cap


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_cut_short_anywhere(file_format: str) -> None:
    grain = np.random.default_rng(0).integers(0, 256, (90, 90, 3), dtype=np.uint8)
    whole = encoded(Image.fromarray(grain), file_format)
    expected = pixels(load_image(whole, 64))
    cuts = sorted({0, 1, 2, 8, 20, 60, *np.linspace(0, len(whole) - 40, 25).astype(int).tolist()})
    for cut in cuts:
        if cut and file_format == "TIFF":
            continue  # the directory of a TIFF may be at either end, so only the cuts below are tested
        assert reason(whole[:cut]) in (images.EMPTY, images.UNKNOWN, images.BROKEN), cut
    assert reason(whole[: len(whole) // 2]) in (images.UNKNOWN, images.BROKEN)
    # Some formats end with bytes that no pixel needs. Without these bytes the image is either complete or dropped.
    for cut in range(1, 20):
        try:
            assert (pixels(load_image(whole[:-cut], 64)) == expected).all()
        except Dropped as dropped:
            assert dropped.reason in (images.UNKNOWN, images.BROKEN)


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bytes_never_raise_anything_else(seed: int) -> None:
    random = np.random.default_rng(seed)
    for file_format in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        whole = np.frombuffer(encoded(noise(40, 40, 4 if file_format == "PNG" else 3), file_format), dtype=np.uint8)
        for _ in range(40):
            damaged = whole.copy()
            damaged[random.integers(0, len(whole), 4)] = random.integers(0, 256, 4)
            try:
                assert load_image(damaged.tobytes(), 32, max_pixels=10**6).size == (32, 32)
            except Dropped as dropped:
                assert dropped.reason in (images.UNKNOWN, images.BROKEN, images.TOO_LARGE)


def test_what_is_no_image() -> None:
    assert reason(b"") == images.EMPTY
    ghost = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"  # Pillow would start Ghostscript for it
    for content in (b"<html>404</html>", b"RIFF0000WEBP", b"\0" * 500, b"\xff\xd8\xff", ghost):
        assert reason(content) in (images.UNKNOWN, images.BROKEN)
