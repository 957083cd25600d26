"""Requests of clients for jobs: typed, and checked before anything starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pgasdl.errors import ConfigError
from pgasdl.jobs.schema import Schema, check, record, refused
from pgasdl.settings.variables import BY_NAME, PREFIX, nearest

MOST_BYTES = 1 << 20  # of a request's body
MOST_RANKS = 65536
MOST_RESTARTS = 1000
MOST_ROWS = 1000  # of a page
LARGEST = 2**53 - 1  # integer that every reader of JSON keeps

_NO_NUL = r"^[^\x00]*$"
_WORD: Schema = {"type": "string", "maxLength": 65536, "pattern": _NO_NUL}
_PATH: Schema = {"type": "string", "minLength": 1, "maxLength": 4095, "pattern": _NO_NUL}

STAGE = record(
    {
        "remote": {
            "type": "array",
            "items": {**_PATH, "description": "A file, folder, pattern or URL."},
            "minItems": 1,
            "maxItems": 1000,
        },
        "local": {**_PATH, "description": "The folder it goes to, under the server's root."},
    },
    format={"type": "string", "maxLength": 32, "pattern": "^[a-z0-9]*$"},
    limit={"type": "string", "maxLength": 32, "pattern": "^[0-9A-Za-z]*$"},
)

RESOURCES = (
    "account", "constraint", "cpus-per-task", "gres", "mem", "nodes", "ntasks-per-node",
    "partition", "qos", "time",
)  # fmt: skip

REQUEST: Schema = {
    "type": "object",
    "required": ["program"],
    "additionalProperties": False,
    "properties": {
        "program": {
            "type": "array",
            "description": "PROGRAM.py or -m MODULE, and arguments, as `pgasdl run` takes them.",
            "items": _WORD,
            "minItems": 1,
            "maxItems": 4096,
        },
        "ranks": {"type": "integer", "minimum": 1, "maximum": MOST_RANKS, "default": 1},
        "name": {
            "type": "string",
            "description": "For people; the program's if it is empty.",
            "maxLength": 100,
            "pattern": r"^[^\x00-\x1f\x7f-\x9f]*$",
            "default": "",
        },
        "folder": {
            **_PATH,
            "description": "Where it runs, under the server's root.",
            "default": ".",
        },
        "environment": {
            "type": "object",
            "description": "Variables beside the server's own.",
            "propertyNames": {
                "type": "string",
                "maxLength": 128,
                "pattern": "^[A-Za-z_][A-Za-z0-9_]*$",
            },
            "additionalProperties": _WORD,
            "maxProperties": 1000,
            "default": {},
        },
        "restarts": {
            "type": "integer",
            "description": "How often it is started again after it failed or was lost.",
            "minimum": 0,
            "maximum": MOST_RESTARTS,
            "default": 0,
        },
        "grace": {
            "type": "integer",
            "description": "Seconds from SIGTERM to SIGKILL when it is stopped.",
            "minimum": 0,
            "maximum": 3600,
            "default": 10,
        },
        "stage": {**STAGE, "description": "What `pgasdl stage` brings before the ranks start."},
        "resources": {
            "type": "object",
            "description": "Options of sbatch by name, as 'partition'; for a server with --slurm.",
            "propertyNames": {"type": "string", "maxLength": 32, "enum": RESOURCES},
            "additionalProperties": {
                "type": "string",
                "minLength": 1,
                "maxLength": 200,
                "pattern": "^[!-~]*$",
            },
            "default": {},
        },
    },
}

# Variables that the launcher or the server sets for each job.
_OURS = {
    f"PGASDL_{name}"
    for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "JOB_ID", "STORE", "SECRET_FD")
} | {"PGASDL_SECRET_FILE", "PGASDL_JOB_FOLDER", "PGASDL_JOB_LINK", "PGASDL_JOB_SERVER"}


@dataclass(frozen=True, slots=True)
class Stage:
    """Data that is brought to this machine first: the arguments of ``pgasdl stage``."""

    remote: tuple[str, ...]
    local: str
    format: str = ""
    limit: str = ""


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job as its user asked for it; :data:`REQUEST` describes the fields."""

    program: tuple[str, ...]
    ranks: int = 1
    name: str = ""
    folder: str = "."
    environment: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0
    grace: int = 10
    stage: Stage | None = None
    resources: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, value: object) -> JobRequest:
        """Check a document; JobError with status 422 names the field that is wrong."""
        check(value, REQUEST)
        assert isinstance(value, dict)
        _check_program(value["program"])
        _check_environment(value.get("environment", {}))
        return cls.from_stored(value)

    @classmethod
    def from_stored(cls, value: dict[str, Any]) -> JobRequest:
        """Read a document that has been checked."""
        fields = value | {"program": tuple(value["program"])}
        if (stage := value.get("stage")) is not None:
            fields["stage"] = Stage(**stage | {"remote": tuple(stage["remote"])})
        return cls(**fields)

    def as_json(self) -> dict[str, Any]:
        """Return the document; ``from_json`` reads it."""
        document = asdict(self)
        if self.stage is None:
            del document["stage"]
        return document

    def title(self) -> str:
        """Return the name, or else the program's."""
        words = self.program[1:] if self.program[0] == "-m" else self.program
        printable = re.sub(r"[\x00-\x1f\x7f-\x9f]", "?", words[0])
        return self.name or printable.rpartition("/")[2][-100:]


def _check_program(words: list[str]) -> None:
    if words[0] == "-m":
        if len(words) < 2 or not words[1]:
            raise refused("program", "-m needs a module")
    elif not words[0] or words[0].startswith("-"):
        raise refused("program[0]", f"{words[0][:100]!r}: PROGRAM.py or -m MODULE")


def _check_environment(environment: dict[str, str]) -> None:
    for name, text in environment.items():
        where = f"environment.{name}"
        if name in _OURS:
            raise refused(where, "the launcher sets it")
        if not name.startswith(PREFIX):
            continue
        if name not in BY_NAME:
            raise refused(where, f"unknown variable; did you mean {nearest(name, BY_NAME)}?")
        try:
            BY_NAME[name].parse(text)
        except ConfigError as error:
            raise refused(where, str(error)) from error
