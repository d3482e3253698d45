"""Tokens of images and sounds: what a hosted model charges for them, from their size, never from their bytes as text.

The two formulas are OpenAI's (platform.openai.com/docs/guides/images-vision, "Calculating costs"): tiles of 512 px
for gpt-4o, gpt-4.1, gpt-5 and the o-series, patches of 32 px for the mini and nano models. OpenAI changes the factors
now and then, other providers have their own formulas: every number from here is an estimate.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct

PATCH_PX = 32
MAX_PATCHES = 1536
TILE_PX = 512
UNKNOWN_PX = (1024, 1024)
"""The size taken for an image behind a URL, or of a format that is not read here."""
AUDIO_TOKENS_PER_S = 10.0
AUDIO_BYTES_PER_S = 16_000
"""128 kbit/s, for sounds whose header does not say."""

_TILES: tuple[tuple[str, int, int], ...] = (  # beginning of a model's name -> tokens of the image, of each tile
    ("gpt-4o-mini", 2833, 5667),
    ("gpt-5", 70, 140),
    ("o1", 75, 150),
    ("o3", 75, 150),
    ("computer-use", 65, 129),
    ("", 85, 170),
)
_PATCHES: tuple[tuple[str, float], ...] = (  # beginning of a model's name -> tokens per patch
    ("gpt-5-mini", 1.62),
    ("gpt-5-nano", 2.46),
    ("gpt-4.1-mini", 1.62),
    ("gpt-4.1-nano", 2.46),
    ("o4-mini", 1.72),
)
_JPEG_FRAMES = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers before which a JPEG's size stands."""
_WAV_HEAD = 32
_HEAD_CHARS = 400_000
"""Of base64 text that is decoded to find the size: a JPEG may carry a large thumbnail before it."""


def image_tokens(width: int, height: int, detail: str = "auto", model: str | None = None) -> int:
    """Tokens of an image of `width` x `height` pixels; `detail` is "low", "high" or "auto" (counted as high)."""
    width, height, name = max(1, width), max(1, height), model or ""
    for start, factor in _PATCHES:
        if name.startswith(start):
            return math.ceil(_patches(width, height) * factor)
    base, tile = next((base, tile) for start, base, tile in _TILES if name.startswith(start))
    return base if detail == "low" else base + tile * _tiles(width, height)


def _tiles(width: float, height: float) -> int:
    """Tiles of the image, fitted into 2048 x 2048 and then down to a shorter side of 768."""
    scale = min(1.0, 2048 / max(width, height))
    width, height = width * scale, height * scale
    scale = min(1.0, 768 / min(width, height))
    return math.ceil(round(width * scale, 6) / TILE_PX) * math.ceil(round(height * scale, 6) / TILE_PX)


def _patches(width: int, height: int) -> int:
    """Patches of the image, scaled so that a whole number of them, at most MAX_PATCHES, covers it."""
    needed = math.ceil(width / PATCH_PX) * math.ceil(height / PATCH_PX)
    if needed <= MAX_PATCHES:
        return needed
    shrink = math.sqrt(PATCH_PX**2 * MAX_PATCHES / (width * height))
    across, down = width * shrink / PATCH_PX, height * shrink / PATCH_PX
    fit = min(math.floor(across) / across, math.floor(down) / down) if min(across, down) >= 1 else 1.0
    return min(MAX_PATCHES, math.ceil(round(across * fit, 6)) * math.ceil(round(down * fit, 6)))


def image_size(data: str) -> tuple[int, int] | None:
    """Width and height in pixels of the PNG, GIF, JPEG or WebP image in base64 text `data`; None if it is no such."""
    raw = decoded_head(data)
    try:
        if raw.startswith(b"\x89PNG\r\n\x1a\n"):
            return struct.unpack(">II", raw[16:24])
        if raw[:6] in (b"GIF87a", b"GIF89a"):
            return struct.unpack("<HH", raw[6:10])
        if raw[:4] == b"RIFF" and raw[8:12] == b"WEBP":
            return _webp_size(raw)
        return _jpeg_size(raw) if raw[:2] == b"\xff\xd8" else None
    except (struct.error, IndexError):
        return None


def _webp_size(raw: bytes) -> tuple[int, int] | None:
    kind = raw[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(raw[24:27], "little"), 1 + int.from_bytes(raw[27:30], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(raw[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack("<HH", raw[26:30])
    return width & 0x3FFF, height & 0x3FFF


def _jpeg_size(raw: bytes) -> tuple[int, int] | None:
    at = 2
    while at + 9 < len(raw):
        marker = raw[at + 1]
        if marker in _JPEG_FRAMES:
            height, width = struct.unpack(">HH", raw[at + 5 : at + 9])
            return width, height
        at += 2 + struct.unpack(">H", raw[at + 2 : at + 4])[0]
    return None


def audio_tokens(data: str) -> int:
    """Tokens of the sound in base64 text `data`: a WAV's duration from its header, else from its size."""
    raw, size_bytes = decoded_head(data[:64]), len(data) * 3 // 4
    bytes_per_s = AUDIO_BYTES_PER_S
    if raw[:4] == b"RIFF" and raw[8:12] == b"WAVE" and len(raw) >= _WAV_HEAD:
        bytes_per_s = struct.unpack("<I", raw[28:32])[0] or AUDIO_BYTES_PER_S
    return max(1, math.ceil(size_bytes / bytes_per_s * AUDIO_TOKENS_PER_S))


def decoded_head(data: str) -> bytes:
    """The first bytes of base64 text, with or without "data:...;base64,"; empty if it is no base64."""
    start = data.find(",", 0, 200) + 1 if data.startswith("data:") else 0
    head = data[start : start + _HEAD_CHARS]
    try:
        return base64.b64decode(head[: len(head) // 4 * 4])
    except (binascii.Error, ValueError):
        return b""
