"""Parsers of values: each turns a variable's text, or an argument of ``init``, into a value."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from typing import Protocol

Address = tuple[str, int]
_MOST_PORTS = 256


class Parser(Protocol):
    """Turns a variable's text into a value; ``check`` does the same for an argument of ``init``.

    Both raise ValueError or TypeError to refuse a value; the table adds the name.
    """

    @property
    def accepted(self) -> str:
        """The values that it accepts, for messages."""

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
        """The values that it accepts, for messages."""
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
class IntegerOf:
    """One of several integers."""

    numbers: tuple[int, ...]

    @property
    def accepted(self) -> str:
        """The values that it accepts, for messages."""
        return "one of " + ", ".join(map(str, self.numbers))

    def parse(self, text: str) -> int:
        """Turn a variable's text into a value."""
        return self.check(Integer(0, max(self.numbers)).parse(text))

    def check(self, value: object) -> int:
        """Turn an argument into a value."""
        number = Integer(0, max(self.numbers)).check(value)
        if number not in self.numbers:
            raise ValueError
        return number


@dataclass(frozen=True)
class PartitionKey:
    """The P_Key of an InfiniBand partition, of which the lower 15 bits name the partition."""

    accepted: str = "a P_Key from 0x1 to 0xffff, but not 0x8000"

    def parse(self, text: str) -> int:
        """Turn a variable's text into a value."""
        if not re.fullmatch(r"0x[0-9a-fA-F]{1,4}|[1-9][0-9]{0,4}", text):
            raise ValueError
        return self.check(int(text, 0))

    def check(self, value: object) -> int:
        """Turn an argument into a value."""
        number = Integer(1, 0xFFFF).check(value)
        if number == 0x8000:
            raise ValueError
        return number


@dataclass(frozen=True)
class Ports:
    """Ports of RDMA devices: those named, or all others."""

    named: tuple[tuple[str, int], ...]  # devices and their ports; port 0: all of the device's
    excluded: bool = False  # all but these

    def allows(self, device: str, port: int) -> bool:
        """Return whether a port may be used."""
        return ((device, port) in self.named or (device, 0) in self.named) != self.excluded

    def __str__(self) -> str:
        """Return the text of the variable."""
        each = (f"{device}:{port}" if port else device for device, port in self.named)
        return ("^" if self.excluded else "") + ",".join(each)


@dataclass(frozen=True)
class PortList:
    """A list of ports of RDMA devices."""

    accepted: str = (
        "names of RDMA devices, as ibv_devices lists them, by commas, each with :PORT (1 to 255) "
        "or with all its ports; after a ^ those not to use, as in mlx5_0:1,mlx5_1 or ^mlx5_2"
    )

    def parse(self, text: str) -> Ports:
        """Turn a variable's text into a value."""
        words = text.removeprefix("^").split(",")
        if len(words) > _MOST_PORTS:
            raise ValueError
        named = []
        for word in words:
            match = re.fullmatch(r"([A-Za-z0-9_.-]{1,64})(?::([0-9]{1,3}))?", word)
            if match is None:
                raise ValueError
            named.append((match[1], Integer(1, 255).parse(match[2]) if match[2] else 0))
        return Ports(tuple(named), text.startswith("^"))

    def check(self, value: object) -> Ports:
        """Turn an argument into a value."""
        if not isinstance(value, (str, Ports)):
            raise TypeError
        return self.parse(str(value))


@dataclass(frozen=True)
class PortRange:
    """A range of ports of TCP, both ends included."""

    accepted: str = "LOW-HIGH, ports from 1 to 65535, as in 20000-20063"

    def parse(self, text: str) -> tuple[int, int]:
        """Turn a variable's text into a value."""
        match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text, re.ASCII)
        if match is None:
            raise ValueError
        return self.check((int(match[1]), int(match[2])))

    def check(self, value: object) -> tuple[int, int]:
        """Turn an argument into a value."""
        if isinstance(value, str):
            return self.parse(value)
        if not isinstance(value, tuple) or len(value) != 2:
            raise TypeError
        low, high = (Integer(1, 65535).check(port) for port in value)
        if low > high:
            raise ValueError
        return low, high


@dataclass(frozen=True)
class Seconds:
    """Seconds in a range, both ends included."""

    low: float
    high: float

    @property
    def accepted(self) -> str:
        """The values that it accepts, for messages."""
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
        """The values that it accepts, for messages."""
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
