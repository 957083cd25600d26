"""Real pictures as a data set: each of ten is a class, cut into tiles, as JPEG in tars.

    python apps/pictures.py FOLDER
    pgasdl run -n 2 apps/train_images.py --data FOLDER/train --test FOLDER/test

Tiles do not overlap; every fifth is held out, in ``test``. Nothing is downloaded: scikit-image and
scikit-learn ship the pictures.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

PICTURES = (
    "skimage/data/astronaut.png",
    "skimage/data/chelsea.png",
    "skimage/data/coffee.png",
    "skimage/data/hubble_deep_field.jpg",
    "skimage/data/ihc.png",
    "skimage/data/motorcycle_left.png",
    "skimage/data/retina.jpg",
    "skimage/data/rocket.jpg",
    "sklearn/datasets/images/china.jpg",
    "sklearn/datasets/images/flower.jpg",
)
HEIGHT = 448  # pixels of each picture, after it is scaled
TILE = 64  # pixels, height and width


def make(folder: Path) -> None:
    """Make the data set, if it is not there: always the same, and the whole or nothing."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        new = Path(temporary, "new")
        for part in ("train", "test"):
            (new / part).mkdir(parents=True)
        for name in PICTURES:
            _cut(name, new)
        try:
            new.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise


def _cut(name: str, folder: Path) -> None:
    """Write a tar of a picture's tiles, and one of those that are held out: every fifth."""
    picture = shipped(name)
    picture = picture.resize((picture.width * HEIGHT // picture.height, HEIGHT))
    columns, rows = picture.width // TILE, picture.height // TILE
    stem, label = Path(name).stem, PICTURES.index(name)
    with (
        tarfile.open(folder / "train" / f"{stem}.tar", "w") as train,
        tarfile.open(folder / "test" / f"{stem}.tar", "w") as test,
    ):
        for row, column in np.ndindex(rows, columns):
            x, y = TILE * column, TILE * row
            tile = picture.crop((x, y, x + TILE, y + TILE))
            tar = test if (2 * row + column) % 5 == 0 else train
            key = f"{stem}-{row:02}-{column:02}"
            add(tar, f"{key}.jpg", encoded(tile, 90))
            add(tar, f"{key}.cls", str(label).encode())


def shipped(name: str) -> Image.Image:
    """Return a picture of a package, as one of ``PICTURES``."""
    package, _, rest = name.partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name} is not there: pip install 'pgasdl[apps]', or give --data")
    with Image.open(Path(spec.origin).parent / rest) as file:
        return file.convert("RGB")


def encoded(picture: Image.Image, quality: int) -> bytes:
    """Return a picture as JPEG."""
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality)
    return file.getvalue()


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a file to a tar."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


# --- records as arrays, for a Loader


def cropped(record: dict[str, Any], random: np.random.Generator, pixels: int) -> dict[str, Any]:
    """Decode a random square of a picture, mirrored or not."""
    picture = _decoded(record)
    side = int(min(picture.size) * random.uniform(0.75, 1))
    x, y = (int(random.integers(extent - side, endpoint=True)) for extent in picture.size)
    picture = picture.resize((pixels, pixels), box=(x, y, x + side, y + side))
    if random.integers(2):
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return _arrays(picture, record)


def whole(record: dict[str, Any], _: np.random.Generator, pixels: int) -> dict[str, Any]:
    """Decode a picture."""
    return _arrays(_decoded(record).resize((pixels, pixels)), record)


def _decoded(record: dict[str, Any]) -> Image.Image:
    names = record.keys() & {"jpg", "jpeg", "png"}
    if not names:
        raise ValueError(f"no jpg, jpeg or png among {', '.join(record)}")
    return Image.open(io.BytesIO(record[names.pop()])).convert("RGB")


def _arrays(picture: Image.Image, record: dict[str, Any]) -> dict[str, Any]:
    return {
        "image": np.asarray(picture).transpose(2, 0, 1),
        "label": np.int64(int(record["cls"])),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    make(parser.parse_args().folder)
