"""Findings of parts, told at once: a part that hangs has told what it found before."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cuda_arrays import NotAvailable


class Tell:
    """Writes findings to a file, a JSON object a line.

    Parameters
    ----------
    path : where to; several processes may write
    rank : None in the part itself; ranks but 0 tell only what is wrong
    prefix : of all names
    """

    def __init__(self, path: Path, rank: int | None = None, prefix: str = "") -> None:
        self.path, self._rank, self._prefix = path, rank, prefix

    def under(self, prefix: str) -> Tell:
        """The same, for names that begin with ``prefix``."""
        return Tell(self.path, self._rank, f"{self._prefix}{prefix}")

    @property
    def prefix(self) -> str:
        """The words with which all names begin."""
        return self._prefix

    def __call__(self, name: str, value: object, unit: str = "", **detail: Any) -> None:
        """Tell a value."""
        if not self._rank:
            self._write({"name": self._prefix + name, "value": value, "unit": unit}, detail)

    def check(self, name: str, held: bool, **detail: Any) -> None:
        """Tell whether something is as it has to be."""
        if held and self._rank:
            return
        where = f" (rank {self._rank})" if self._rank else ""
        value = "holds" if held else "FAILS"
        named = f"{self._prefix}{name}{where}"
        self._write({"name": named, "value": value, "unit": "", "held": held}, detail)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Tell what ends a step before its end; what comes after the step goes on."""
        try:
            yield
        except NotAvailable as missing:
            self(name, f"not available: {missing}")
        except Exception as error:
            self.check(name, False, error=f"{type(error).__name__}: {error}")

    def _write(self, finding: dict[str, Any], detail: dict[str, Any]) -> None:
        line = json.dumps(finding | ({"detail": detail} if detail else {}), default=str)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, line.encode() + b"\n")
        finally:
            os.close(descriptor)


def read(path: Path) -> list[dict[str, Any]]:
    """All findings so far."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
