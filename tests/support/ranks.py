"""Tests that are programs: each rank, a thread of this process, calls the test's function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from pgasdl import loopback


def on_ranks(
    size: int | None = None,
    *parameters: str,
    run: Callable[..., object] = loopback.run,
    **options: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let ranks call a test with a context each, its first argument, and with its parameters.

    Parameters
    ----------
    size : how many; None: the test's parameter ``size``
    parameters : names of the test's parameters that `run` takes, too
    run : what starts the ranks, given the size, the rank's function and the options
    options : of `run`
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def started(**values: Any) -> None:
            run(
                values["size"] if size is None else size,
                lambda ctx: test(ctx, **values),
                **options | {name: values[name] for name in parameters},
            )

        signature = inspect.signature(test)
        own = list(signature.parameters.values())[1:]
        started.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return started

    return decorate
