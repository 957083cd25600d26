"""What to measure, as the command line says it and as the ranks get it."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass

from pgasdl import models
from pgasdl.errors import ConfigError

OPS = ("write_notify", "allreduce", "model", "rdma", "mpi")
TRANSPORTS = ("auto", "shm", "verbs", "mpi", "loopback")
PEERS = ("mpich", "mpich-generic", "openmpi", "gloo")
DEFAULT_SIZES = {
    "write_notify": "8,1K,16K,256K,4M",
    "allreduce": "8,1K,16K,256K,1M,4M,16M,64M,256M",
    "model": "",
    "rdma": "8,4K,64K,1M",
    "mpi": "8,4K,64K,1M,4M,16M",
}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_LARGEST = 1 << 36


@dataclass(frozen=True, slots=True)
class Request:
    """One call of the command.

    Attributes
    ----------
    op : one of :data:`OPS`
    ranks : processes, or threads with transport "loopback"
    plan : None: chosen by size
    sizes : bytes
    models : names of layer lists
    bucket_bytes : 0: layers travel alone
    rounds : how often the contenders take turns
    seconds : of one contender's turn, about
    peers : names of :data:`PEERS`
    """

    op: str
    ranks: int = 2
    transport: str = "auto"
    plan: str | None = None
    sizes: tuple[int, ...] = ()
    models: tuple[str, ...] = ()
    bucket_bytes: int = 0
    rounds: int = 10
    seconds: float = 0.02
    peers: tuple[str, ...] = ()
    json_file: str | None = None

    def dump(self) -> str:
        """As one argument of the ranks' command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def load(cls, text: str) -> Request:
        """What :meth:`dump` wrote."""
        fields = json.loads(text)
        for name in ("sizes", "models", "peers"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


def parse_size(text: str) -> int:
    """Bytes of "8", "16K", "4M" or "1G".

    Raises
    ------
    ConfigError   anything else, nothing, or more than 64G
    """
    match = re.fullmatch(r"([0-9]{1,12})([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if not 0 < size <= _LARGEST:
        raise ConfigError(f"size {text!r}: a number of bytes such as 8, 16K, 4M, at most 64G")
    return size


def parse_sizes(text: str, multiple: int) -> tuple[int, ...]:
    """Bytes of "8,1K,4M", each of which must be a multiple of an element."""
    sizes = tuple(parse_size(part) for part in text.split(","))
    for size in sizes:
        if size % multiple:
            raise ConfigError(f"size {size}: not a multiple of an element's {multiple} bytes")
    return sizes


def parse_names(text: str, known: tuple[str, ...], what: str) -> tuple[str, ...]:
    """Names of "a,b", or all of them for "all"."""
    names = known if text == "all" else tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in known:
            raise ConfigError(f"no {what} {name!r}; there are {', '.join(known)}, or all")
    return names


def model_names(text: str) -> tuple[str, ...]:
    """The models of "resnet50,vgg16"."""
    return parse_names(text, models.NAMES, "model")
