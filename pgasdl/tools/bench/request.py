"""The request: what to measure, from the command line to the ranks."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

DEFAULT_SIZES = {
    "write_notify": "8,1K,16K,256K,4M",
    "allreduce": "8,1K,16K,256K,1M,4M,16M,64M,256M",
    "model": "",
    "c10d": "8,4K,64K,1M,16M,64M",
}


@dataclass(frozen=True, slots=True)
class Request:
    """The measurement that one command asks for."""

    op: str  # the operation that ``pgasdl bench`` measures, or "tune"
    ranks: int = 2  # processes, or threads with transport "loopback"
    transport: str = "auto"
    operation: str = "allreduce"  # of ``plans``
    plan: str | None = None  # None: chosen by size
    sizes: tuple[int, ...] = ()  # bytes
    models: tuple[str, ...] = ()  # names of layer lists
    bucket_bytes: int = 0  # 0: layers travel alone
    rounds: int = 10  # turns of each contender
    seconds: float = 0.02  # length of one turn, about
    as_json: bool = False  # print one JSON document, no table
    rows_file: str | None = None  # file for the document of ``plans`` instead of standard output
    policy_file: str | None = None  # file for the policy of ``tune``
    plan_modules: str | None = None  # None: those of ``PGASDL_PLAN_MODULES``

    @property
    def command(self) -> str:
        """The words typed after ``pgasdl``."""
        return self.op if self.op == "tune" else f"bench {self.op}"

    def dump(self) -> str:
        """Return the request as one argument of the ranks' command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def load(cls, text: str) -> Request:
        """Return the request that :meth:`dump` wrote."""
        fields = json.loads(text)
        for name in ("sizes", "models"):
            fields[name] = tuple(fields[name])
        return cls(**fields)
