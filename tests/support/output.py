"""Splits ranks' output as it arrives."""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

_SHOWN = 4000  # characters of a log

Event = dict[str, Any]


class Lines:
    """Splits a rank's output, which arrives in pieces, into lines."""

    def __init__(self) -> None:
        self._begun = b""

    def of(self, piece: bytes) -> list[str]:
        """The lines that end in this piece; an empty piece, the end, also ends a begun line."""
        if self._begun and not piece:
            piece = b"\n"
        *lines, self._begun = (self._begun + piece).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


def event_of(line: str) -> Event | None:
    """The JSON object on a line; None if the line is anything else."""
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) else None


class Log:
    """An unnamed file that processes write to, and that is read while they run."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115
        self._shown = 0

    def more(self) -> str:
        """The output since the last call, or only its end if long; nothing once closed."""
        if self.file.closed:
            return ""
        size = os.fstat(self.file.fileno()).st_size
        begin = max(self._shown, size - _SHOWN)
        self._shown = size
        return os.pread(self.file.fileno(), size - begin, begin).decode(errors="replace")

    def close(self) -> None:
        self.file.close()
