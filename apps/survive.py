"""Lose a rank in the middle of training; the others go on from the last checkpoint.

    pgasdl run --keep-going -n 3 apps/survive.py --checkpoints FOLDER --kill-rank 1 --at-iteration 8
    pgasdl run --keep-going -n 3 apps/survive.py --checkpoints FOLDER

In the second, kill -9 one of the processes that it names. Without ``--data``, rank 0 makes real
pictures in FOLDER/pictures.

The survivors' weights are those of a run that was started on as many ranks from that checkpoint.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pictures
from images_course import Course, Team, add_options, prepare
from torch import Tensor

import pgasdl
from pgasdl.checkpoint import FORMATS, Checkpoints


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train, and survive the loss of ranks.")
    add_options(parser)
    add = parser.add_argument
    add("--checkpoints", metavar="FOLDER", required=True, help="the same for all ranks")
    add("--format", choices=FORMATS, default=FORMATS[0], help="of checkpoints")
    add("--every", type=int, default=5, help="iterations from one checkpoint to the next")
    add("--kill-rank", type=int, help="rank that kills itself")
    add("--at-iteration", type=int, default=8, help="in whose backward it does so")
    return parser.parse_args(arguments)


def kill_in_backward(course: Course, iteration: int) -> None:
    """Let this process end in that iteration, when half of the gradients are under way."""

    def arrived(_: Tensor) -> None:
        if course.iteration == iteration:
            os.kill(os.getpid(), signal.SIGKILL)

    parameters = list(course.model.parameters())
    parameters[len(parameters) // 2].register_post_accumulate_grad_hook(arrived)


def train(ctx: pgasdl.Context, course: Course, checkpoints: Checkpoints) -> str:
    """Train to the end with the ranks that are left; return the fingerprint of their weights."""
    group = ctx.world
    while True:
        try:
            team = Team(ctx, group)
            if not course.resume(checkpoints, team):
                course.save(checkpoints, team)
            if team.rank == 0:
                who = f"ranks {list(group.ranks)}"
                print(f"{who} start from iteration {course.iteration}", flush=True)
            course.train(team, partial(_after_iteration, course, checkpoints, team))
            digest = course.common_digest(team)
            # A rank that passes knows that the last checkpoint is written; others will load it.
            group.barrier()
            return digest
        except pgasdl.PeerLostError as error:
            print(f"rank {ctx.rank}, iteration {course.iteration}: {error}", flush=True)
        while (survivors := _regroup(ctx)) is None:
            pass
        group = survivors


def _regroup(ctx: pgasdl.Context) -> pgasdl.Group | None:
    """Form a group of those that are left; None if another is lost meanwhile."""
    try:
        return ctx.survivors()
    except pgasdl.PeerLostError:
        return None


def _after_iteration(course: Course, checkpoints: Checkpoints, team: Team) -> None:
    done, given = course.iteration, course.given
    if team.rank == 0:
        print(f"iteration {done} of {given.iterations}", flush=True)
    if done % given.every == 0 or done == given.iterations:
        course.save(checkpoints, team)


def main() -> None:
    """Join the job, train, and say which weights there are at the end."""
    given = options()
    prepare(given)
    with pgasdl.init() as ctx:
        print(f"rank {ctx.rank} is process {os.getpid()}", flush=True)
        if not given.data:
            folder = Path(given.checkpoints, "pictures")
            given.data = str(folder / "train")
            if ctx.rank == 0:
                pictures.make(folder)
        course = Course(given)
        if ctx.rank == given.kill_rank:
            kill_in_backward(course, given.at_iteration)
        digest = train(ctx, course, Checkpoints(given.checkpoints, given.format))
        print(f"rank {ctx.rank}: loss {course.losses[-1]:.4f}, weights: sha256 {digest[:16]}")


if __name__ == "__main__":
    main()
