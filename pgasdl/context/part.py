"""The parts of a context see it as this class: the core, and the attributes that all share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pgasdl import _native
from pgasdl.collectives.allreduce import Allreduces
from pgasdl.collectives.arrays import ArrayCollectives
from pgasdl.collectives.policy import Policy
from pgasdl.collectives.state import CollectiveState
from pgasdl.config import Config, Limits
from pgasdl.group import Group
from pgasdl.job import Job
from pgasdl.pool import Pool
from pgasdl.segment import SegmentTable
from pgasdl.topology import Launch, Topology

if TYPE_CHECKING:
    Core = _native.ContextCore
else:  # a class that is called for each message has the core as its own base
    Core = object


class Part(Core):
    """A part of :class:`pgasdl.Context`, which is the only class that is made."""

    config: Config
    topology: Topology
    launch: Launch
    policy: Policy
    world: Group
    segments: SegmentTable
    state: CollectiveState
    _job: Job
    _pool: Pool
    _allreduces: Allreduces
    _arrays: ArrayCollectives

    if TYPE_CHECKING:  # what a part takes from another

        @property
        def limits(self) -> Limits: ...  # noqa: D102
        def group(  # noqa: D102
            self, ranks: Iterable[int], *, timeout: float | None = None
        ) -> Group: ...
