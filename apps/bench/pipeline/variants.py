"""The table of variants: ways to exchange gradients. A new one is one row."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Self

from torch import distributed

import pgasdl
import pgasdl.torch
from bench.cuts import DDP, FUSED, LAYERS
from bench.jobs import Peer
from bench.pipeline.buckets import Buckets
from bench.pipeline.cases import Case, Local, Ours, Runner, Theirs
from bench.pipeline.mpi import start
from bench.pipeline.ours import Average, Packed, SCaffe
from bench.pipeline.settings import Settings
from bench.pipeline.training import Attached, ByLayers, Ddp, Training
from bench.pipeline.waiting import LayerExchange, NoExchange, WaitingRunner
from bench.pipeline.workload import Workload, workload
from pgasdl.errors import UnavailableError
from pgasdl.plans import PLANS
from pgasdl.tools.bench.turns import PATIENCE


class Job:
    """The parts of which variants are made, in this rank's job."""

    def __init__(self, ctx: pgasdl.Context, settings: Settings, mpi: str) -> None:
        self.ctx, self.settings = ctx, settings
        self.work: Workload = workload(settings.network, settings.batch, settings.size)
        self._mpi = mpi
        self._peer: Peer | None = None
        self._peers = itertools.count()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def group(self, backend: str) -> Any:
        """Return a process group of torch.distributed. Collective.

        Raises UnavailableError on all ranks where nobody has registered the backend.
        """
        ctx = self.ctx
        if not distributed.is_backend_available(backend):
            raise UnavailableError(f"torch.distributed has no backend {backend!r}")
        if self._folder is None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            self._folder = tempfile.TemporaryDirectory(prefix="pgasdl-pipeline-")
            mine = f"{self._folder.name}/store"
            store = ctx.world.allgather("store", mine.encode())[0].decode()
            distributed.init_process_group(
                "gloo", f"file://{store}", rank=ctx.rank, world_size=ctx.size
            )
        return distributed.new_group(backend=backend, timeout=timedelta(seconds=PATIENCE))

    def theirs(self, name: str, what: str, nbytes: int) -> Case:
        """Make a case in an MPI job. Raises UnavailableError, on all ranks."""
        reason = ""
        if self._peer is None and self.ctx.rank == 0:
            try:
                self._peer = start(self._mpi, self.ctx.size)
            except UnavailableError as error:
                reason = str(error)
        reason = self.ctx.world.allgather("mpi", reason.encode(), PATIENCE)[0].decode()
        if reason:
            raise UnavailableError(reason)
        made = Theirs(self.ctx, name, what, peer=self._peer, number=next(self._peers))
        if self._peer is not None:
            settings = asdict(self.settings)
            made.plan = self._peer.ask(op="make", settings=settings, nbytes=nbytes)[0]
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the MPI job and torch.distributed; behind an error, without the other ranks."""
        if self._peer is not None:
            self._peer.close()
        if self._folder is not None and kind is None:
            distributed.destroy_process_group()
            self.ctx.barrier(timeout=PATIENCE)  # nobody needs the folder of rank 0 any more
            self._folder.cleanup()


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of the table."""

    # For the command line and the table.
    name: str
    what: str
    layers: Callable[[Job], LayerExchange] | None = None  # makes the exchange of layers
    # Makes the training with compute "real"; None: one with gradients in the exchange of layers.
    training: Callable[[Job], Training] | None = None
    only: str = ""  # the only kind of compute that it has; "": both
    thread: bool = False  # pgasdl's progress thread runs
    alone: bool = False  # rank 0 computes while the others sleep
    mpi: int | None = None  # in an MPI job: bytes of a bucket

    def make(self, job: Job) -> Case:
        """Make the case that is measured. Collective.

        Raises
        ------
        PlanError, UnavailableError
            It cannot run here.
        """
        if self.mpi is not None:
            return job.theirs(self.name, self.what, self.mpi)
        if self.alone:
            runner = self._alone(job) if job.ctx.rank == 0 else None
            local = Local(runner, lambda: None) if runner else None
            return Ours(job.ctx, self.name, self.what, local=local)
        runner = self._runner(job)
        local = Local(runner, partial(job.ctx.barrier, timeout=PATIENCE))
        return Ours(job.ctx, self.name, self.what, runner.plan, local=local, thread=self.thread)

    def _alone(self, job: Job) -> Runner:
        settings = job.settings
        times = job.ctx.size if settings.scaling == "strong" else 1
        if settings.compute == "wait":
            nothing = NoExchange(job.work.counts)
            return WaitingRunner(job.work, nothing, times * settings.seconds, 0, 1)
        return Training(settings.network, times * settings.batch, settings.size, 0)

    def _runner(self, job: Job) -> Runner:
        settings, ctx = job.settings, job.ctx
        if settings.compute == "real" and self.training is not None:
            return self.training(job)
        assert self.layers is not None
        exchange = self.layers(job)
        if settings.compute == "wait":
            return WaitingRunner(
                job.work, exchange, settings.seconds, ctx.rank, ctx.size, write=settings.write
            )
        return ByLayers(
            settings.network,
            settings.batch,
            settings.size,
            ctx.rank,
            ctx.size,
            job.work,
            exchange,
        )


# --- makers


def average(**options: Any) -> Callable[[Job], LayerExchange]:
    """Average layer by layer with pgasdl."""
    return lambda job: Average(job.ctx, job.work.names, job.work.counts, **options)


def packed(plan: str) -> Callable[[Job], LayerExchange]:
    """All-reduce everything in one buffer, as swCaffe."""
    return lambda job: Packed(job.ctx, job.work.names, job.work.counts, plan)


def scaffe(
    reduce_layers: bool, broadcast_layers: bool, naive: bool = False
) -> Callable[[Job], LayerExchange]:
    """Reduce and broadcast, as S-Caffe."""
    return lambda job: SCaffe(
        job.ctx,
        job.work.names,
        job.work.counts,
        reduce_layers=reduce_layers,
        broadcast_layers=broadcast_layers,
        naive=naive,
    )


def buckets(backend: str, nbytes: int = DDP, hook: bool = False) -> Callable[[Job], LayerExchange]:
    """All-reduce buckets over a backend of torch.distributed."""
    return lambda job: Buckets(
        job.group(backend),
        job.work.names,
        job.work.counts,
        nbytes=nbytes,
        state=pgasdl.torch.DDPState(job.ctx) if hook else None,
    )


def attached(**options: Any) -> Callable[[Job], Training]:
    """Train with ``pgasdl.torch.attach``."""

    def make(job: Job) -> Training:
        of = job.settings
        return Attached(job.ctx, of.network, of.batch, of.size, **options)

    return make


def ddp(backend: str, hook: bool = False) -> Callable[[Job], Training]:
    """Train with DistributedDataParallel over a backend of torch.distributed."""

    def make(job: Job) -> Training:
        of, group = job.settings, job.group(backend)
        return Ddp(job.ctx, of.network, of.batch, of.size, job.work, group, hook=hook)

    return make


def nothing(job: Job) -> LayerExchange:
    """Exchange nothing."""
    return NoExchange(job.work.counts)


def alone(job: Job) -> Training:
    """Train every rank for itself."""
    of = job.settings
    return Training(of.network, of.batch, of.size, job.ctx.rank)


BASELINES = [
    Variant("one-rank", "one rank alone, while the others sleep", alone=True),
    Variant("compute", "all ranks, no exchange", nothing, alone),
]
VARIANTS = [
    Variant("attach", "a turn at each layer, mean gradients", average(), attached()),
    Variant(
        "caffegpi",
        "CaffeGPI: up a tree, the root updates, and down",
        average(plan="tree", update=True),
        attached(kind="update", plan="tree", early=True),
    ),
    Variant(
        "mimatrix",
        "MiMatrix: GDRAA, every worker updates",
        average(plan="gdraa"),
        attached(plan="gdraa"),
    ),
    Variant("swcaffe", "swCaffe: packed, halving and doubling", packed("halving-doubling")),
    Variant("attach-thread", "a progress thread", average(), attached(), thread=True),
    Variant(
        "attach-phased",
        "all layers after the backward pass",
        average(phased=True),
        attached(phased=True),
    ),
    Variant("sc-b", "S-Caffe: packed, after backward", scaffe(False, False), only="wait"),
    Variant(
        "sc-ob-naive",
        "S-Caffe: the next layer's broadcast ahead",
        scaffe(False, True, naive=True),
        only="wait",
    ),
    Variant("sc-ob", "S-Caffe: broadcast by layer", scaffe(False, True), only="wait"),
    Variant("sc-obr", "S-Caffe: reduce by layer too", scaffe(True, True), only="wait", thread=True),
    Variant("ddp-gloo", "DistributedDataParallel, gloo", buckets("gloo"), ddp("gloo")),
    Variant(
        "ddp-hook",
        "DistributedDataParallel, pgasdl's hook",
        buckets("gloo", hook=True),
        ddp("gloo", hook=True),
    ),
    Variant(
        "ddp-pgasdl",
        "DistributedDataParallel, backend pgasdl",
        buckets("pgasdl"),
        ddp("pgasdl"),
    ),
    Variant("gloo-layers", "gloo, each layer", buckets("gloo", LAYERS)),
    Variant("gloo-fused", "gloo, all at once after backward", buckets("gloo", FUSED)),
    Variant("mpi-layers", "mpi4py, each layer, nonblocking", mpi=LAYERS),
    Variant("mpi-fused", "mpi4py, all after backward", mpi=FUSED),
    *(
        Variant(f"plan-{name}", f"as attach, plan {name}", average(plan=name), attached(plan=name))
        for name, spec in PLANS.items()
        if "average" in spec.kinds
    ),
]
