"""Text of commands: sizes and names that they take, tables and documents that they print."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pgasdl.errors import ConfigError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_LARGEST = 1 << 36
ALL = "all"


def parse_size(text: str) -> int:
    """Return the bytes of "8", "16K", "4M" or "1G"; ConfigError: other text, or more than 64G."""
    match = re.fullmatch(r"([0-9]{1,12})([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if not 0 < size <= _LARGEST:
        raise ConfigError(f"size {text!r}: a number of bytes such as 8, 16K, 4M, at most 64G")
    return size


def parse_sizes(text: str, multiple: int) -> tuple[int, ...]:
    """Return the bytes of "8,1K,4M"; each must be a multiple of an element."""
    sizes = tuple(parse_size(part) for part in text.split(","))
    for size in sizes:
        if size % multiple:
            raise ConfigError(f"size {size}: not a multiple of an element's {multiple} bytes")
    return sizes


def unknown_name(given: str, known: Iterable[str], what: str) -> ConfigError:
    """Return the error of an unknown name; it lists the known ones."""
    known = list(known)
    close = get_close_matches(given, known, 1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return ConfigError(f"no {what} {given!r}; {meant}there are {', '.join(known)}")


def parse_names(text: str, known: tuple[str, ...], what: str) -> tuple[str, ...]:
    """Return the names in "a,b", or all known names for "all"."""
    names = known if text == ALL else tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in known:
            raise unknown_name(name, (*known, ALL), what)
    return names


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows as lines with columns; spaces at the end are cut."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()


def write_json(document: Any, file: Path | None = None) -> None:
    """Write one document to a file, or to standard output."""
    text = json.dumps(document, indent=2) + "\n"
    if file is not None:
        file.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
        sys.stdout.flush()
