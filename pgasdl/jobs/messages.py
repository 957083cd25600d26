"""The messages of a job that trains: commands to it, metrics and events back. JSON, with a version.

A command has a name and a value. Those of :data:`COMMANDS` are built in; a program adds others by a
handler for their names. Metrics are numbers of an iteration, by name; an event is a message to
people; a rank's counters are the bytes that it has moved and its waits so far.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from pgasdl.counters import Counters, LayerTimes, Traffic, Waits
from pgasdl.jobs.requests import LARGEST, MOST_RANKS
from pgasdl.jobs.schema import Schema, check, record, refused

VERSION = 1
MOST_VALUE_BYTES = 4096  # of a command's value
MOST_NUMBERS = 100  # of one message of metrics
MOST_TEXT = 4096  # characters of an event
MOST_METRICS, MOST_EVENTS, MOST_COUNTED = 500, 20, 16  # messages of a report

_VERSION: Schema = {"type": "integer", "minimum": VERSION, "maximum": VERSION, "default": VERSION}
NAME: Schema = {"type": "string", "maxLength": 64, "pattern": r"^[A-Za-z][A-Za-z0-9_./-]*$"}
_NUMBER: Schema = {"type": ["number", "null"], "description": "null: not finite."}
_COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": LARGEST}
_TIME: Schema = {"type": "number", "description": "Seconds since 1970."}
_NOTHING: Schema = {"type": ["null"]}
_ANY: Schema = {"type": ["null", "boolean", "number", "string", "array", "object"]}


# The schema of each built-in command's value.
COMMANDS: dict[str, Schema] = {
    "start": _NOTHING,
    "pause": _NOTHING,
    "resume": _NOTHING,
    "set": record({"name": NAME, "value": {"type": ["boolean", "number", "string"]}}),
    "evaluate": _NOTHING,
    "checkpoint": _NOTHING,
    "stop": _NOTHING,
}
COMMAND: Schema = record({"name": NAME}, value={**_ANY, "default": None}, version=_VERSION)
METRICS: Schema = record(
    {
        "iteration": _COUNT,
        "time": _TIME,
        "numbers": {
            "type": "object",
            "propertyNames": NAME,
            "additionalProperties": _NUMBER,
            "maxProperties": MOST_NUMBERS,
        },
    }
)
EVENT: Schema = record(
    {
        "iteration": _COUNT,
        "time": _TIME,
        "name": NAME,
        "text": {"type": "string", "maxLength": MOST_TEXT},
    },
    command={**_COUNT, "description": "Of the outcome of a command: its number."},
)
_SECONDS: Schema = {"type": "number"}


def _by(names: str, numbers: int, item: Schema, description: str) -> Schema:
    """Describe a map from names of a pattern to lists of so many numbers."""
    return {
        "type": "object",
        "description": description,
        "propertyNames": {"type": "string", "maxLength": 32, "pattern": names},
        "additionalProperties": {
            "type": "array",
            "items": item,
            "minItems": numbers,
            "maxItems": numbers,
        },
    }


COUNTERS: Schema = record(
    {
        "rank": {"type": "integer", "minimum": 0, "maximum": MOST_RANKS - 1},
        "iteration": _COUNT,
        "time": _TIME,
        "memory": {**_COUNT, "description": "Bytes that its process has in memory."},
        "registrations": _COUNT,
        "losses": _COUNT,
        "peers": _by(
            "^[0-9]{1,5}$", 5, _COUNT,
            "By rank: bytes and messages written, bytes and messages read, notifications.",
        ),
        "waits": _by("^[a-z_]{1,32}$", 2, _SECONDS, "By cause: how many, and seconds."),
        "layers": _by(
            "^[0-9]{1,9}/[0-9]{1,9}$", 5, _SECONDS,
            "By exchange and layer: exchanges, and seconds computing, queued, exchanging, waiting.",
        ),
    }
)  # fmt: skip
REPORT: Schema = record(
    {
        "metrics": {"type": "array", "items": METRICS, "maxItems": MOST_METRICS},
        "events": {"type": "array", "items": EVENT, "maxItems": MOST_EVENTS},
        "dropped": {**_COUNT, "description": "Messages that the job had no room to keep."},
    },
    ranks={"type": "array", "items": COUNTERS, "maxItems": MOST_COUNTED, "default": []},
    version=_VERSION,
)


@dataclass(frozen=True, slots=True)
class Command:
    """A command to a job: a name, and a value of at most 4 KiB of JSON."""

    name: str
    value: Any = None
    number: int = field(default=0, compare=False)  # the server's

    def __post_init__(self) -> None:
        check(self.name, NAME, "name")
        if self.name in COMMANDS:
            check(self.value, COMMANDS[self.name], "value")
        check(self.value, _ANY, "value")
        try:
            size = len(json.dumps(self.value, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise refused("value", f"no JSON: {error}") from error
        if size > MOST_VALUE_BYTES:
            raise refused("value", f"{size} bytes of JSON; at most {MOST_VALUE_BYTES}")

    def as_json(self) -> dict[str, Any]:
        """Return the document; ``from_json`` reads it."""
        return {"version": VERSION, "name": self.name, "value": self.value}

    def __str__(self) -> str:
        return self.name + ("" if self.value is None else f" {json.dumps(self.value)}")

    @classmethod
    def from_json(cls, document: object, number: int = 0) -> Command:
        """Check a document; JobError with status 422 says which name or field is wrong."""
        check(document, COMMAND)
        assert isinstance(document, dict)
        return cls(document["name"], document.get("value"), number)


@dataclass(frozen=True, slots=True)
class Metrics:
    """Numbers of an iteration, by name."""

    iteration: int
    time: float
    numbers: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        """Return the document; JSON knows no NaN and no infinity: they are null."""
        numbers = {
            name: float(number) if math.isfinite(number) else None
            for name, number in self.numbers.items()
        }
        _check_names(tuple(numbers))
        check(self.iteration, _COUNT, "iteration")
        return {"iteration": self.iteration, "time": self.time, "numbers": numbers}


@lru_cache
def _check_names(names: tuple[str, ...]) -> None:
    """Check the names of metrics: once, as a training sends the same ones all the time."""
    check(dict.fromkeys(names), METRICS["properties"]["numbers"], "numbers")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in an iteration."""

    iteration: int
    time: float
    name: str
    text: str = ""
    command: int = 0  # the number of that whose outcome it is

    def as_json(self) -> dict[str, Any]:
        """Return the document; a long text is cut, and half a surrogate pair in it becomes "?"."""
        document = {
            "iteration": self.iteration,
            "time": self.time,
            "name": self.name,
            "text": self.text[:MOST_TEXT].encode(errors="replace").decode(),
        } | ({"command": self.command} if self.command else {})
        check(document, EVENT)
        return document


@dataclass(frozen=True, slots=True)
class RankCounters:
    """The counters of a rank at an iteration, and the bytes that its process has in memory."""

    rank: int
    iteration: int
    time: float
    memory: int
    counters: Counters

    def as_json(self) -> dict[str, Any]:
        """Return the document; ``from_json`` reads it. Peers without traffic are left out."""
        counted = self.counters
        return {
            "rank": self.rank,
            "iteration": self.iteration,
            "time": self.time,
            "memory": self.memory,
            "registrations": counted.registrations,
            "losses": counted.losses,
            "peers": {
                str(peer): [
                    each.bytes_written, each.messages_written,
                    each.bytes_read, each.messages_read, each.notifications,
                ]
                for peer, each in enumerate(counted.peers)
                if each != Traffic()
            },
            "waits": {
                cause: [each.number, round(each.seconds, 6)]
                for cause, each in counted.waits.items()
            },
            "layers": {
                f"{exchange}/{layer}": [
                    each.exchanges, round(each.computing, 6), round(each.queued, 6),
                    round(each.exchanging, 6), round(each.waiting, 6),
                ]
                for (exchange, layer), each in counted.layers.items()
            },
        }  # fmt: skip

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> RankCounters:
        """Read a document that has been checked."""
        peers = [Traffic()] * (1 + max(map(int, document["peers"]), default=-1))
        for peer, numbers in document["peers"].items():
            peers[int(peer)] = Traffic(*numbers)
        counters = Counters(
            tuple(peers),
            document["registrations"],
            {cause: Waits(*numbers) for cause, numbers in document["waits"].items()},
            document["losses"],
            {
                (int(exchange), int(layer)): LayerTimes(*numbers)
                for name, numbers in document["layers"].items()
                for exchange, layer in [name.split("/")]
            },
        )
        fields = {name: document[name] for name in ("rank", "iteration", "time", "memory")}
        return cls(**fields, counters=counters)
