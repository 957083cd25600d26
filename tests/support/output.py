"""What ranks write, taken apart as it comes."""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

_SHOWN = 4000  # characters of a log

Event = dict[str, Any]


class Lines:
    """Cuts the pieces in which a rank's output comes into its lines."""

    def __init__(self) -> None:
        self._begun = b""

    def of(self, piece: bytes) -> list[str]:
        """The lines that end in this piece; an empty one, the end, ends what was begun, too."""
        if self._begun and not piece:
            piece = b"\n"
        *lines, self._begun = (self._begun + piece).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


def event_of(line: str) -> Event | None:
    """What a line says in JSON, an object; None: it is other words."""
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) else None


class Log:
    """A file without a name that processes write to, read while they run."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115
        self._shown = 0

    def more(self) -> str:
        """What was written since this was last asked, at most the end; nothing once closed."""
        if self.file.closed:
            return ""
        size = os.fstat(self.file.fileno()).st_size
        begin = max(self._shown, size - _SHOWN)
        self._shown = size
        return os.pread(self.file.fileno(), size - begin, begin).decode(errors="replace")

    def close(self) -> None:
        self.file.close()
