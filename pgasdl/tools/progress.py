"""A progress bar on standard error, if that is a terminal.

click counts and lays it out. It is drawn here because click hides the cursor, which a killed rank
would not show again, and because a table grows above it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

_NARROWEST = 20


class Progress:
    """The steps of one task, as a context manager; with 0 steps it shows nothing."""

    def __init__(self, label: str, steps: int) -> None:
        self._bar: Any = None
        self._drawn = 0
        if steps and sys.stderr.isatty():
            import click  # not in ranks that show nothing

            self._bar = click.progressbar(length=steps, label=label, file=sys.stderr)

    def __enter__(self) -> Progress:
        self._draw()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._rub_out()

    def step(self, label: str = "") -> None:
        """Finish one step; the next one is ``label``, if given."""
        if self._bar is not None:
            self._bar.make_step(1)
            if label:
                self._bar.label = label
            self._rub_out()
            self._draw()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Make room for a line of other output."""
        self._rub_out()
        yield
        self._draw()

    def _draw(self) -> None:
        if self._bar is not None:
            line = self._bar.format_progress_line()[: _columns() - 1]
            self._drawn = len(line)
            print(f"\r{line}", end="", file=sys.stderr, flush=True)

    def _rub_out(self) -> None:
        if self._drawn:
            print(f"\r{' ' * self._drawn}\r", end="", file=sys.stderr, flush=True)
            self._drawn = 0


def _columns() -> int:
    """Return the columns of standard error's terminal; standard output may be a file."""
    columns = 0
    with contextlib.suppress(OSError, ValueError):
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    return max(_NARROWEST, columns) if columns else 80
