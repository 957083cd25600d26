"""The output of a benchmark's rank 0: lines as they come, a bar, and the JSON at the end."""

from __future__ import annotations

import sys
from typing import IO, Any

from pgasdl.context import Context
from pgasdl.tools.bench.request import Request
from pgasdl.tools.json_document import takes_stdout, write_json
from pgasdl.tools.progress import Progress


class Output:
    """A context manager; ``steps``: how often :meth:`step` is called, 0: no bar."""

    def __init__(
        self, json_file: str | None, *, label: str = "", steps: int = 0, out: IO[str] | None = None
    ) -> None:
        self._json_file = json_file
        self._out = out or sys.stdout
        self._progress = Progress(label, steps)
        self.silent = takes_stdout(json_file)

    def __enter__(self) -> Output:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)

    def say(self, line: str) -> None:
        """Print a line, unless standard output is for the JSON document."""
        if not self.silent:
            self._print(line, self._out)

    def warn(self, line: str) -> None:
        """Print a line, also beside a JSON document."""
        self._print(line, sys.stderr if self.silent else self._out)

    def _print(self, line: str, out: IO[str]) -> None:
        with self._progress.aside():
            print(line, file=out, flush=True)

    def step(self) -> None:
        """Advance the bar."""
        self._progress.step()

    def write(self, document: Any) -> None:
        """Write the JSON document, if it was asked for."""
        with self._progress.aside():
            write_json(document, self._json_file)


class _Nothing(Output):
    def _print(self, line: str, out: IO[str]) -> None:
        pass

    def write(self, document: Any) -> None:
        pass


def output_of(context: Context, request: Request, steps: int) -> Output:
    """Return the output of rank 0; that of other ranks prints nothing."""
    if context.rank != 0:
        return _Nothing(None)
    name = "pgasdl tune" if request.op == "tune" else f"pgasdl bench {request.op}"
    found = Output(request.json_file, label=f"{name}, {context.size} ranks", steps=steps)
    found.silent = found.silent or not request.table
    return found
