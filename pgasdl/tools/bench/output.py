"""The output of a benchmark's rank 0: lines as they come, and the JSON at the end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pgasdl.tools.json_document import write_json


class Output:
    """The output of a rank; only rank 0 has any.

    ``as_json``: standard output is for the JSON document, not for lines. ``file``: for the
    document; None: standard output, or nothing without ``as_json``.
    """

    def __init__(self, rank: int = 0, *, as_json: bool = False, file: str | None = None) -> None:
        self._tells, self._as_json, self._file = rank == 0, as_json, file

    def say(self, line: str) -> None:
        """Print a line, unless standard output is for the JSON document."""
        if self._tells and not self._as_json:
            print(line, flush=True)

    def warn(self, line: str) -> None:
        """Print a line, also beside a JSON document."""
        if self._tells:
            print(line, file=sys.stderr if self._as_json else sys.stdout, flush=True)

    def write(self, document: Any) -> None:
        """Write the JSON document, if it was asked for."""
        if self._tells and (self._file is not None or self._as_json):
            write_json(document, Path(self._file) if self._file is not None else None)
