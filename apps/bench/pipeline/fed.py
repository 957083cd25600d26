"""Iterations that take their images from a data set."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

import pgasdl
from bench.pipeline.cases import Case, Local, Ours, Runner, latest
from bench.pipeline.pictures import decode
from bench.pipeline.settings import Settings
from bench.pipeline.training import Training
from pgasdl.input import Loader, Records
from pgasdl.tools.bench.turns import PATIENCE

_N_CLASSES = 1000
_DEPTH = 3  # batches that are ready at most


@dataclass(frozen=True, slots=True)
class Share:
    """The cost of input for a variant, in milliseconds."""

    name: str  # the row with images of the data set
    # Medians: such an iteration, one with input that was made up, and the wait for images.
    iteration: float
    without: float
    wait: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.iteration:.2f} ms an iteration, {self.without:.2f} with made-up "
            f"images; it waits {self.wait:.2f} ms for them"
        )

    def document(self) -> dict[str, object]:
        """Return the fields for JSON."""
        return asdict(self)


class Input:
    """The data set, and a row with its images for each case that every rank has here.

    Attributes
    ----------
    rows : list[Case]
    """

    def __init__(
        self, ctx: pgasdl.Context, remote: str, of: Settings, cases: Sequence[Case]
    ) -> None:
        self._ctx = ctx
        self._pictures = Pictures(ctx, remote, of)
        self._of: list[tuple[Case, Fed]] = []
        self.rows: list[Case] = []
        for case in cases:
            if isinstance(case, Ours) and case.local is not None:
                fed = Fed(case.local.runner, self._pictures)
                local = Local(fed, partial(ctx.barrier, timeout=PATIENCE))
                row = Ours(ctx, f"{case.name}+data", case.what, local=local, thread=case.thread)
                self._of.append((case, fed))
                self.rows.append(row)

    def shares(self) -> list[Share]:
        """Return the cost of input, the same on every rank. Collective."""
        return [
            Share(
                row.name,
                row.iteration.samples().median / 1e3,
                case.iteration.samples().median / 1e3,
                1e3 * latest(self._ctx, statistics.median(fed.waits)),
            )
            for row, (case, fed) in zip(self.rows, self._of, strict=True)
        ]

    def close(self) -> None:
        """End the threads that decode."""
        self._pictures.close()


class Pictures:
    """Batches of pictures (jpg, cls), decoded by as many threads as a rank computes with."""

    def __init__(self, ctx: pgasdl.Context, remote: str, of: Settings) -> None:
        self._records = Records(remote, group=ctx.world)
        self._loader = Loader(
            self._records,
            of.batch * ctx.size,
            decode=partial(decode, side=of.size),
            last="fill",
            workers=of.threads,
            depth=_DEPTH,
        )
        self._batches = self._forever()

    def _forever(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            for batch in self._loader:
                images = torch.from_numpy(batch["image"]).permute(0, 3, 1, 2) / 255
                yield images, torch.from_numpy(batch["label"]) % _N_CLASSES

    def next(self) -> tuple[Tensor, Tensor]:
        """Return images and labels."""
        return next(self._batches)

    def close(self) -> None:
        """End the threads."""
        self._loader.close()
        self._records.close()


class Fed:
    """Another runner's iterations, each with the next images; it notes the seconds it waits."""

    def __init__(self, runner: Runner, pictures: Pictures) -> None:
        self._runner, self._pictures = runner, pictures
        self.recorder, self.plan = runner.recorder, runner.plan
        self._rested = True
        self.waits: list[float] = []

    def iterate(self) -> None:
        """Make one iteration; with waits for compute, the images are only taken."""
        began = time.monotonic()
        if self._rested:  # the first of a turn counts nowhere
            for _ in range(_DEPTH):  # decoded while others had their turns
                self._pictures.next()
        images, labels = self._pictures.next()
        ended = time.monotonic()
        if not self._rested and not self.recorder.on:
            self.waits.append(ended - began)
        self._rested = False
        self.recorder.add("host", "input", began, ended)
        if isinstance(self._runner, Training):
            self._runner.inputs, self._runner.labels = images, labels
        self._runner.iterate()

    def drain(self) -> None:
        """Let everything end."""
        self._runner.drain()
        self._rested = True

    def exchange(self) -> float:
        """Nothing: the other runner's is measured."""
        return 0.0

    def recording(self) -> AbstractContextManager[None]:
        """Record spans in the ``with`` block."""
        return self._runner.recording()

    def close(self) -> None:
        """Nothing: the other runner closes."""
