"""A training that can stop anywhere and go on: on as many ranks, on fewer, on more, or alone."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
from collections.abc import Callable
from functools import partial
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
import pictures
import torch
from images_net import Network
from torch import nn

import pgasdl
import pgasdl.torch
from pgasdl.checkpoint import Checkpoints
from pgasdl.input import Loader, Records

MEMORY = 256 << 20  # most bytes of the data set that each rank keeps for all


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

    def told(self, text: str) -> str:
        """The first rank's text."""
        coded = np.zeros(1024, np.int32)
        coded[: len(text)] = [ord(each) for each in text]
        return "".join(map(chr, self.gather(coded)[0])).rstrip("\0")


class Course:
    """Model, optimizer, schedule and position: all that the next iteration depends on."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.model = Network(given.seed, given.classes, given.dropout)
        # A smaller eps makes large steps of small gradients, and of their rounding.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), given.rate, eps=1e-4)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, given.iterations
        )
        self.iteration = 0
        self.losses: list[float] = []  # of the global batches
        self._recent: list[float] = []  # of this rank's shares, since the last of `losses`
        self._position: dict[str, Any] = {}  # the loader's state; empty: the beginning
        self.nbytes = self.nbytes_read = 0  # of the data set, and what all ranks read of storage

    def train(
        self, team: Team, after: Callable[[], None] = lambda: None, until: int | None = None
    ) -> None:
        """Train to the end, or ``until`` an iteration; call ``after`` after each."""
        given = self.given
        end = given.iterations if until is None else until
        if self.iteration == 0:
            torch.manual_seed(given.seed * 1_000_003 + team.rank)
        if self.iteration >= end:
            return
        with Records(given.data, group=team.group, memory=MEMORY) as records:
            decode = partial(pictures.cropped, pixels=given.pixels)
            with (
                Loader(records, given.batch, decode=decode, seed=given.seed) as loader,
                team.attach(self.model, self.optimizer),
            ):
                if self._position:
                    loader.load_state_dict(self._position)
                batches = chain.from_iterable(repeat(loader))  # of one epoch after another
                for batch in islice(batches, end - self.iteration):
                    self._iterate(team, batch)
                    self._position = loader.state_dict()
                    after()
            self._share_losses(team)
            # Nobody reads any more, so the counters are final.
            self.nbytes = records.files.nbytes
            self.nbytes_read += int(team.gather(np.array([records.counters().storage])).sum())

    def _iterate(self, team: Team, batch: dict[str, np.ndarray]) -> None:
        scores = self.model(_normalised(batch["image"]))
        labels = torch.from_numpy(batch["label"])
        # Divided by the global batch: the mean over ranks is the mean over the batch.
        loss = nn.functional.cross_entropy(scores, labels, reduction="sum") / self.given.batch
        self._recent.append(loss.item())
        (loss * team.size).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.iteration += 1

    @torch.no_grad()
    def accuracy(self, data: str) -> tuple[float, int]:
        """Return which part of a data set's records gets the right class, and how many there are.

        For one rank alone.
        """
        decode = partial(pictures.whole, pixels=self.given.pixels)
        with Records(data) as records, Loader(records, 1, decode=decode, seed=None) as loader:
            self.model.eval()
            found = [
                int(self.model(_normalised(batch["image"])).argmax()) == batch["label"].item()
                for batch in loader
            ]
            self.model.train()
        return float(np.mean(found)), len(found)

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
            "loader": self._position,
            "course": self._settings(),
            "losses": self.losses,
            "random": torch.from_numpy(team.gather(torch.get_rng_state().numpy().astype(np.int32))),
        }

    def _settings(self) -> dict[str, Any]:
        """Return the settings that fix, with the iteration, the next images and the rate."""
        names = ("seed", "batch", "pixels", "classes", "iterations")
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
        self.iteration, self._position = state["iteration"], state["loader"]
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


def _normalised(images: np.ndarray) -> torch.Tensor:
    """Return numbers from -1 to 1 for bytes."""
    return torch.from_numpy(images).to(torch.get_default_dtype()) / 127.5 - 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every program with a course."""
    add = parser.add_argument
    add(
        "--data",
        default="",
        help="tars, a folder, or a URL, of jpg or png with cls; without it, "
        "pictures that packages ship",
    )
    add("--classes", type=int, default=len(pictures.PICTURES), help="of the data")
    add("--iterations", type=int, default=200)
    add("--batch", type=int, default=24, help="images of one batch, of all ranks together")
    add("--pixels", type=int, default=64, help="height and width of the images")
    add("--rate", type=float, default=0.003, help="learning rate at the start; falls to 0")
    add("--dropout", type=float, default=0.0, help="other than 0, ranks differ from one process")
    add("--seed", type=int, default=1)
    add("--dtype", choices=("float32", "float64"), default="float32")
    add("--threads", type=int, default=1, help="threads of each rank; changes the bits")


def prepare(given: argparse.Namespace) -> None:
    """Make PyTorch compute the same bits in every run."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(given.threads)
    torch.set_default_dtype(getattr(torch, given.dtype))
