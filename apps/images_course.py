"""A training that can stop anywhere and go on: on as many ranks, on fewer, on more, or alone."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from images_net import Images, Network
from torch import nn

import pgasdl
import pgasdl.torch
from pgasdl.checkpoint import Checkpoints
from pgasdl.input import Batches


class Team:
    """The ranks that train: a group of a job, or (without a context) this process alone."""

    def __init__(
        self,
        ctx: pgasdl.Context | None = None,
        group: pgasdl.Group | None = None,
        **options: Any,
    ) -> None:
        self.ctx, self.group = ctx, group or (ctx.world if ctx else None)
        self.rank = self.group.rank if self.group else 0
        self.size = self.group.size if self.group else 1
        self.options = options

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        """The one line that makes a training loop distributed."""
        if self.ctx is None:
            return contextlib.nullcontext()
        return pgasdl.torch.attach(
            model, optimizer, context=self.ctx, group=self.group, **self.options
        )

    def gather(self, array: np.ndarray) -> np.ndarray:
        """Every rank's array, in one with a row for each."""
        everybody = np.zeros((self.size, *array.shape), array.dtype)
        everybody[self.rank] = array
        if self.ctx is not None:
            self.ctx.allreduce(everybody, group=self.group)
        return everybody


class Course:
    """Model, optimizer, schedule and position: all that the next iteration depends on."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.images = Images(given.seed, given.pixels)
        self.model = Network(given.seed, given.dropout)
        # A smaller eps makes large steps of small gradients, and of their rounding.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), given.rate, eps=1e-4)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, given.iterations
        )
        self.iteration = 0
        self.losses: list[float] = []  # of the global batches
        self._recent: list[float] = []  # of this rank's shares, since the last of `losses`

    def train(
        self, team: Team, after: Callable[[], None] = lambda: None, until: int | None = None
    ) -> None:
        """Train to the end, or ``until`` an iteration; call ``after`` after each."""
        end = self.given.iterations if until is None else until
        if self.iteration == 0:
            torch.manual_seed(self.given.seed * 1_000_003 + team.rank)
        given = self.given
        place = {"rank": team.rank, "size": team.size}
        batches = Batches(self.images.count, given.batch, seed=given.seed, **place)
        with team.attach(self.model, self.optimizer):
            while self.iteration < end:
                self._iterate(team, batches)
                after()
        self._share_losses(team)

    def _iterate(self, team: Team, batches: Batches) -> None:
        images, labels = self.images.load(torch.from_numpy(batches.rows(self.iteration)))
        scores = self.model(images.to(torch.get_default_dtype()))
        # Divided by the global batch: the mean over ranks is the mean over the batch.
        loss = nn.functional.cross_entropy(scores, labels, reduction="sum") / self.given.batch
        self._recent.append(loss.item())
        (loss * team.size).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.iteration += 1

    def _share_losses(self, team: Team) -> None:
        self.losses += team.gather(np.array(self._recent)).sum(0).tolist()
        self._recent.clear()

    # --- checkpoints

    def state(self, team: Team) -> dict[str, Any]:
        """Everything that a checkpoint holds; the same on all ranks. Collective."""
        self._share_losses(team)
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer_state(),
            "scheduler": self.scheduler.state_dict(),
            "iteration": self.iteration,
            "course": self._settings(),
            "losses": self.losses,
            "random": torch.from_numpy(team.gather(torch.get_rng_state().numpy().astype(np.int32))),
        }

    def _settings(self) -> dict[str, Any]:
        """What says, with the iteration, which images come next, and how the rate falls."""
        names = ("seed", "batch", "pixels", "iterations")
        return {name: getattr(self.given, name) for name in names}

    def _optimizer_state(self) -> dict[str, Any]:
        """The whole state, wherever its parts are."""
        return self.optimizer.state_dict()

    def load(self, state: dict[str, Any], team: Team) -> None:
        """Go on from a state, on any number of ranks. Not while it trains."""
        if state["course"] != self._settings():
            raise SystemExit(
                f"the checkpoint was made with {state['course']}, not with {self._settings()}"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.iteration = state["iteration"]
        self.losses, self._recent = list(state["losses"]), []
        if team.rank < len(state["random"]):
            torch.set_rng_state(state["random"][team.rank].to(torch.uint8))
        else:  # a rank more than there were
            torch.manual_seed((self.given.seed * 1_000_003 + team.rank) * 1_009 + self.iteration)

    def save(self, checkpoints: Checkpoints, team: Team) -> None:
        """Write a checkpoint. Collective."""
        state = self.state(team)
        if team.rank == 0:
            checkpoints.save(self.iteration, state)

    def resume(self, checkpoints: Checkpoints, team: Team) -> bool:
        """Go on from the last checkpoint, if there is one. Collective; not while it trains."""
        state = checkpoints.load_last()
        found = team.gather(np.array([-1 if state is None else state["iteration"]])).flatten()
        if len(set(found.tolist())) > 1:
            raise SystemExit(
                f"the ranks found checkpoints of iterations {found.tolist()} in "
                f"{checkpoints.folder}: all need the same folder"
            )
        if state is not None:
            self.load(state, team)
        return state is not None

    # --- bits

    def digest(self) -> str:
        """Return a fingerprint of the weights' bits."""
        sha = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            sha.update(tensor.numpy().tobytes())
        return sha.hexdigest()

    def common_digest(self, team: Team) -> str:
        """Return the fingerprint of the weights, which all ranks must have. Collective."""
        digest = self.digest()
        digests = team.gather(np.frombuffer(bytes.fromhex(digest), np.int32))
        if (digests != digests[0]).any():
            raise SystemExit("the ranks have different weights")
        return digest


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every program with a course understands."""
    add = parser.add_argument
    add("--iterations", type=int, default=40)
    add("--batch", type=int, default=12, help="images of one batch, of all ranks together")
    add("--pixels", type=int, default=224, help="height and width of the images")
    add("--rate", type=float, default=0.005, help="learning rate at the start; falls to 0")
    add("--dropout", type=float, default=0.0, help="other than 0, ranks differ from one process")
    add("--seed", type=int, default=1)
    add("--dtype", choices=("float32", "float64"), default="float32")
    add("--threads", type=int, default=1, help="threads of each rank; changes the bits")


def prepare(given: argparse.Namespace) -> None:
    """Make PyTorch compute the same bits in every run."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(given.threads)
    torch.set_default_dtype(getattr(torch, given.dtype))
