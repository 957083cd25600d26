"""Run exchanges, and the computation around them, on a modelled machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pgasdl import _native
from pgasdl.errors import ConfigError, PlanError
from pgasdl.simulate.machine import Machine
from pgasdl.simulate.program import Exchange, program

Floats = npt.NDArray[np.float64]

_COMPUTE, _START, _JOIN = range(3)


@dataclass(frozen=True, slots=True)
class Compute:
    """Every rank computes for these seconds, times its own factor."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Start:
    """Begin an exchange, by its number; returns at once."""

    exchange: int


@dataclass(frozen=True, slots=True)
class Join:
    """Wait until an exchange is over on this rank."""

    exchange: int


Action = Compute | Start | Join


@dataclass(frozen=True, slots=True)
class Outcome:
    """The times of a simulation, in seconds.

    Attributes
    ----------
    finish : Floats
        [exchange, rank]: when the exchange ended on the rank.
    moments : Floats
        [action, rank]: when the application ended the action.
    levels : dict[str, tuple[float, float]]
        For each level of the machine: bytes of the messages that met there, and how long the
        busiest link out of a group was busy.
    busiest_port : float
        How long the busiest port out was busy.
    messages : int
        Number of messages.
    messages_of_rank, neighbours : int
        Counts of the rank that has most: messages that it sends, and ranks to which it sends or
        from which it gets any; each of these takes a connection.
    """

    finish: Floats
    moments: Floats
    levels: dict[str, tuple[float, float]]
    busiest_port: float
    messages: int
    messages_of_rank: int
    neighbours: int

    @property
    def seconds(self) -> float:
        """When the last rank ended."""
        ends = [array.max() for array in (self.finish, self.moments) if array.size]
        return float(max(ends, default=0.0))


def simulate(
    machine: Machine,
    exchanges: Sequence[Exchange],
    application: Sequence[Action] | None = None,
    *,
    begin: Sequence[float] | None = None,
    slow: Sequence[float] | None = None,
) -> Outcome:
    """Run ``application`` on every rank.

    Parameters
    ----------
    machine : Machine
        Its size is the number of ranks.
    exchanges : Sequence[Exchange]
        Start and Join refer to these by number; equal ones share one program.
    application : Sequence[Action], optional
        None: start all exchanges, then wait for them.
    begin : Sequence[float], optional
        When each rank starts, seconds; None: all at 0.
    slow : Sequence[float], optional
        Factor on each rank's computation; None: 1.

    Returns
    -------
    Outcome
        When each rank ended each exchange and each action, and how busy the machine was.

    Raises
    ------
    PlanError
        A plan that does not exist, or a lane that waits for ever.
    ConfigError
        ``begin`` or ``slow`` has another length.
    """
    size = machine.size
    numbers = range(len(exchanges))
    actions: list[Action] = (
        [*(Start(n) for n in numbers), *(Join(n) for n in numbers)]
        if application is None
        else list(application)
    )
    for what, values in (("begin", begin), ("slow", slow)):
        if values is not None and (len(values) != size or min(values, default=0.0) < 0):
            raise ConfigError(f"{what}: {size} figures are needed, none below 0")
    known: dict[Exchange, int] = {}
    jobs = [known.setdefault(exchange, len(known)) for exchange in exchanges]
    programs = [program(exchange, size) for exchange in known]
    levels, costs = machine.native()
    finish, moments, busy, nbytes, messages, stuck = _native.simulate(
        levels,
        costs,
        programs,
        jobs,
        [_action(action) for action in actions],
        list(begin or [0.0] * size),
        list(slow or [1.0] * size),
    )
    if stuck:
        raise PlanError(f"simulation: {stuck}")
    names = [level.name for level in machine.levels]
    return Outcome(
        finish.reshape(len(exchanges), size),
        moments.reshape(len(actions), size),
        {name: (nbytes[at], busy[at + 1]) for at, name in enumerate(names)},
        busy[0],
        messages,
        *_native.traffic(programs, jobs, size),
    )


def _action(action: Action) -> tuple[int, int, float]:
    match action:
        case Compute(seconds):
            return _COMPUTE, 0, seconds
        case Start(exchange):
            return _START, exchange, 0.0
        case Join(exchange):
            return _JOIN, exchange, 0.0
