"""Runs a target written in Python under libFuzzer, with atheris.

``python tests/fuzz/fuzz_drive.py TARGET [options of libFuzzer] [CORPUS...]``
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

TARGETS = ("client", "frames", "policy", "settings", "store", "words")


class Input:
    """The bytes of one execution, taken from the front; zeros once there are no more."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def byte(self) -> int:
        return self.bytes(1)[0] if self else 0

    def bytes(self, most: int) -> bytes:
        taken = self._data[self._at : self._at + most]
        self._at += len(taken)
        return taken

    def rest(self) -> bytes:
        return self.bytes(len(self._data))


def target(name: str) -> Callable[[bytes], None]:
    """The function that takes one input per call."""
    one: Callable[[bytes], None] = importlib.import_module(f"fuzz_{name}").one
    return one


def main(name: str, options: list[str]) -> None:
    """Fuzz until libFuzzer's own options end it."""
    import atheris

    with atheris.instrument_imports(include=["pgasdl"]):
        one = target(name)
    atheris.Setup([sys.argv[0], *options], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
