"""Pictures of ImageNet's size in webdataset's tars, and the same in a folder; how one is decoded.

Nothing heavy is imported: processes that decode load this module.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from pictures import PICTURES, add, encoded, shipped
from PIL import Image, ImageOps

SIZE = 500, 375  # pixels: the mean of ImageNet's
SIDE = 224


def decode(
    record: dict[str, Any], random: np.random.Generator | None = None, *, side: int = SIDE
) -> dict[str, Any]:
    """Decode a picture, and scale and crop it to a square."""
    with Image.open(io.BytesIO(record["jpg"])) as picture:
        square = ImageOps.fit(picture.convert("RGB"), (side, side))
    return {"image": np.array(square), "label": int(record["cls"])}


def written(folder: Path, count: int, n_tars: int) -> list[Path]:
    """Write ``jpegs/NUMBER.jpg`` and as many samples, jpg and cls, in tars; return the tars."""
    tars = [folder / f"pictures-{number:04}.tar" for number in range(n_tars)]
    jpegs = folder / "jpegs"
    jpegs.mkdir()
    sources, chance = [shipped(name) for name in PICTURES], np.random.default_rng(0)
    for number, path in enumerate(tars):
        with tarfile.open(path, "w") as tar:
            for row in range(count * number // n_tars, count * (number + 1) // n_tars):
                jpeg = _cut(sources[row % len(sources)], chance)
                (jpegs / f"{row:06}.jpg").write_bytes(jpeg)
                add(tar, f"{row:06}.jpg", jpeg)
                add(tar, f"{row:06}.cls", str(row).encode())
    return tars


def _cut(source: Image.Image, chance: np.random.Generator) -> bytes:
    """Return a random part of a picture as JPEG."""
    width = min(source.width, source.height * SIZE[0] / SIZE[1]) * chance.uniform(0.6, 1)
    height = width * SIZE[1] / SIZE[0]
    left = chance.uniform(0, source.width - width)
    top = chance.uniform(0, source.height - height)
    part = source.resize(SIZE, box=(left, top, left + width, top + height))
    return encoded(part, 98)
