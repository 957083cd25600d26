"""Parsers of values: each turns a variable's text, or an argument of ``init``, into a value."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from typing import Protocol

Address = tuple[str, int]


class Parser(Protocol):
    """Turns a variable's text into a value; ``check`` does the same for an argument of ``init``.

    Both raise ValueError or TypeError to refuse a value; the table adds the name.
    """

    @property
    def accepted(self) -> str:
        """What it accepts, for messages."""

    def parse(self, text: str) -> object:
        """Turn a variable's text into a value."""

    def check(self, value: object) -> object:
        """Turn an argument into a value."""


@dataclass(frozen=True)
class Integer:
    """An integer in a range, both ends included."""

    low: int
    high: int

    @property
    def accepted(self) -> str:
        """What it accepts, for messages."""
        return f"an integer from {self.low} to {self.high}"

    def parse(self, text: str) -> int:
        """Turn a variable's text into a value."""
        # int() alone would take "1_000", " 1 " and other scripts' digits. 20 digits bound its work.
        if not re.fullmatch(r"[0-9]{1,20}", text):
            raise ValueError
        return self.check(int(text))

    def check(self, value: object) -> int:
        """Turn an argument into a value."""
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError
        number = int(value.__index__())
        if not self.low <= number <= self.high:
            raise ValueError
        return number


@dataclass(frozen=True)
class Seconds:
    """Seconds in a range, both ends included."""

    low: float
    high: float

    @property
    def accepted(self) -> str:
        """What it accepts, for messages."""
        return f"seconds, from {self.low:g} to {self.high:g}"

    def parse(self, text: str) -> float:
        """Turn a variable's text into a value."""
        if not re.fullmatch(
            r"([0-9]{1,20}(\.[0-9]{0,20})?|\.[0-9]{1,20})([eE][+-]?[0-9]{1,2})?", text
        ):
            raise ValueError
        return self.check(float(text))

    def check(self, value: object) -> float:
        """Turn an argument into a value."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError
        if not math.isfinite(value) or not self.low <= value <= self.high:
            raise ValueError
        return float(value)


@dataclass(frozen=True)
class OneOf:
    """One of several names."""

    names: tuple[str, ...]

    @property
    def accepted(self) -> str:
        """What it accepts, for messages."""
        return "one of " + ", ".join(self.names)

    def parse(self, text: str) -> str:
        """Turn a variable's text into a value."""
        return self.check(text)

    def check(self, value: object) -> str:
        """Turn an argument into a value."""
        if not isinstance(value, str) or value not in self.names:
            raise ValueError
        return value


@dataclass(frozen=True)
class Text:
    """Text that a pattern matches as a whole."""

    pattern: str
    accepted: str

    def parse(self, text: str) -> str:
        """Turn a variable's text into a value."""
        return self.check(text)

    def check(self, value: object) -> str:
        """Turn an argument into a value."""
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, str) or not re.fullmatch(self.pattern, value, re.DOTALL):
            raise ValueError
        return value


@dataclass(frozen=True)
class HostPort:
    """A host and a port."""

    accepted: str = "HOST:PORT, or [IPV6]:PORT, with a port from 1 to 65535"

    def parse(self, text: str) -> Address:
        """Turn a variable's text into a value."""
        match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([\w.-]+)):([0-9]{1,5})", text, re.ASCII)
        if match is None:
            raise ValueError
        return self.check((match[1] or match[2], int(match[3])))

    def check(self, value: object) -> Address:
        """Turn an argument into a value."""
        if isinstance(value, str):
            return self.parse(value)
        if not isinstance(value, tuple) or len(value) != 2:
            raise TypeError
        host, port = value
        if not isinstance(host, str) or not host or type(port) is not int:
            raise TypeError
        if not 1 <= port <= 65535:
            raise ValueError
        return host, port
