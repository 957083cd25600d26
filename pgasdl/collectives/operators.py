"""Operators of an allreduce, and the arrays that a collective works on."""

from __future__ import annotations

from typing import Any

from pgasdl.buffers import Memory, memory_of
from pgasdl.device.names import name_of
from pgasdl.errors import BufferRefused

# The kind of plan for each operator of an allreduce; the last three change what reductions do.
KIND_OF_OPERATOR = {"mean": "average", "sum": "sum", "min": "sum", "max": "sum", "prod": "sum"}


def kind_of(op: str) -> str:
    """Return the kind of plan for an operator of an allreduce."""
    if op not in KIND_OF_OPERATOR:
        known = ", ".join(KIND_OF_OPERATOR)
        raise BufferRefused(f"operator {op!r}: an allreduce takes {known}")
    return KIND_OF_OPERATOR[op]


def reduction_of(op: str) -> str:
    """Return what the reductions of its plan do to several arrays."""
    return "sum" if op == "mean" else op


def checked(array: Any, kind: str, reduction: str = "sum") -> Memory:
    """Describe an array; refuse it if collectives of this kind cannot work on it."""
    memory = memory_of(array, device=True)
    integers = memory.native_dtype.startswith("int")  # raises if the core cannot reduce the dtype
    if kind == "average" and integers:
        raise BufferRefused("the mean of integers is not an integer: sum, then divide")
    if reduction != "sum" and memory.device is not None:
        raise BufferRefused(f"{reduction} on {name_of(memory.device)}: a GPU does sums and means")
    return memory
