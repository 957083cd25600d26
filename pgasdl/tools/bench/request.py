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
    """The measurement that one command asks for.

    Attributes
    ----------
    op : str
        The operation that ``pgasdl bench`` measures, or "tune".
    ranks : int
        Processes, or threads with transport "loopback".
    plan : str or None
        None: chosen by size.
    sizes : tuple[int, ...]
        Bytes.
    models : tuple[str, ...]
        Names of layer lists.
    bucket_bytes : int
        0: layers travel alone.
    rounds : int
        Turns of each contender.
    seconds : float
        Length of one turn, about.
    as_json : bool
        Print one JSON document, no table.
    rows_file : str or None
        File for the document of ``plans`` instead of standard output.
    policy_file : str or None
        File for the policy of ``tune``.
    plan_modules : str or None
        None: those of ``PGASDL_PLAN_MODULES``.
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
    as_json: bool = False
    rows_file: str | None = None
    policy_file: str | None = None
    plan_modules: str | None = None

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
