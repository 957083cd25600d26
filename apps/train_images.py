"""Train a residual network on real pictures, on several ranks; stop and go on as you like.

    pgasdl run -n 2 apps/train_images.py --picture train_images.png
    pgasdl run -n 3 apps/train_images.py --checkpoints FOLDER --until 20
    pgasdl run -n 2 apps/train_images.py --checkpoints FOLDER

The pictures come as JPEG from a data set's files: without ``--data``, from a folder that rank 0
makes and removes. On several machines, give one that all see (``pictures.py`` makes it), or a URL.
Its bytes are read once for all ranks, which decode what they need.

The first draws the loss of the ranks over that of one process, a plain PyTorch loop: they differ by
rounding, which training makes larger. The third goes on where the second stopped: to the bit on as
many ranks.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pictures
from images_course import Course, Team, add_options, prepare

import pgasdl
from pgasdl.checkpoint import FORMATS, Checkpoints
from pgasdl.plans import PLANS


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train a network on images.")
    add_options(parser)
    add = parser.add_argument
    add("--test", default="", help="data as for --data, to tell the accuracy on at the end")
    add("--plan", choices=sorted(PLANS), help="how; without it, the best for this transport")
    add("--checkpoints", metavar="FOLDER", help="write checkpoints, and go on from the last one")
    add("--format", choices=FORMATS, default=FORMATS[0], help="of checkpoints")
    add("--every", type=int, default=10, help="iterations from one checkpoint to the next")
    add("--until", type=int, help="stop before this iteration")
    add("--picture", default="", metavar="FILE", help="loss of the ranks, over one process's")
    return parser.parse_args(arguments)


def train(team: Team, given: argparse.Namespace) -> Course:
    """Train, with checkpoints if they are wanted."""
    course = Course(given)
    until = given.iterations if given.until is None else min(given.until, given.iterations)
    if not given.checkpoints:
        course.train(team, partial(_tell, course, team), until)
        return course
    checkpoints = Checkpoints(given.checkpoints, given.format)
    if course.resume(checkpoints, team) and team.rank == 0:
        print(f"going on from iteration {course.iteration}", flush=True)
    course.train(team, partial(_save_at_times, course, checkpoints, team, until), until)
    return course


def _tell(course: Course, team: Team) -> None:
    """Say ten times how far it is."""
    done, n = course.iteration, course.given.iterations
    if team.rank == 0 and done % max(1, n // 10) == 0:
        print(f"iteration {done} of {n}", flush=True)


def _save_at_times(course: Course, checkpoints: Checkpoints, team: Team, until: int) -> None:
    _tell(course, team)
    if course.iteration % course.given.every == 0 or course.iteration == until:
        course.save(checkpoints, team)


def draw(path: str, ours: list[float], alone: list[float], n_ranks: int) -> None:
    """Write the picture: both curves over each other, and their difference."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7, 5), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    iterations = np.arange(1, len(ours) + 1)
    name = f"{n_ranks} ranks" if n_ranks > 1 else "1 rank"
    above.plot(iterations, ours, color="#f0a04b", linewidth=5, label=name)
    above.plot(iterations, alone[: len(ours)], color="#2f5d9b", label="one process, plain PyTorch")
    above.set_ylabel("loss of the batch")
    above.set_title("Loss while training", loc="left", fontweight="bold")
    above.set_ylim(0)
    above.legend(frameon=False)
    difference = np.abs(np.subtract(ours, alone[: len(ours)]))
    below.plot(iterations, np.where(difference > 0, difference, np.nan), ".", color="#c8552b")
    below.set_yscale("log")
    below.set_ylabel("difference")
    below.set_xlabel("iteration")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def report(course: Course, seconds: float, team: Team) -> None:
    """Print how the training went."""
    ranks = "1 rank" if team.size == 1 else f"{team.size} ranks"
    print(f"{ranks}, {course.iteration} iterations, {seconds:.1f} s, loss {course.losses[-1]:.4f}")
    print(f"weights: sha256 {course.digest()[:16]}, the same bits on {ranks}")
    if course.nbytes:
        read, nbytes = course.nbytes_read / 1e6, course.nbytes / 1e6
        print(f"{read:.1f} MB read from storage for {ranks}; the data set has {nbytes:.1f} MB")
    if course.given.test:
        right, count = course.accuracy(course.given.test)
        chance = 1 / course.given.classes
        print(f"{right:.0%} of {count} unseen images get the right class (by chance {chance:.0%})")


def compare(course: Course, team: Team) -> None:
    """Train alone, and draw both losses."""
    given = course.given
    alone = Course(given)
    print("the same in one process, to compare")
    alone.train(Team(), partial(_tell, alone, Team()), course.iteration)
    draw(given.picture, course.losses, alone.losses, team.size)
    worst = np.abs(np.subtract(course.losses, alone.losses)).max()
    print(f"picture: {given.picture}; the losses differ by at most {worst:.1e}")


def made(stack: ExitStack) -> Path:
    """Make pictures in a folder that goes with ``stack``."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the folder goes, too
    temporary = tempfile.TemporaryDirectory(prefix="pgasdl-pictures-")
    folder = Path(stack.enter_context(temporary), "pictures")
    pictures.make(folder)
    return folder


def main() -> None:
    """Join the job, train, and compare with one process."""
    given = options()
    prepare(given)
    with ExitStack() as stack:
        with pgasdl.init() as ctx:
            team = Team(ctx, plan=given.plan)
            if not given.data:
                folder = made(stack) if team.rank == 0 else Path()
                folder = Path(team.told(str(folder)))
                given.data, given.test = str(folder / "train"), str(folder / "test")
            began = time.monotonic()
            course = train(team, given)
            seconds = time.monotonic() - began
            course.common_digest(team)
        if team.rank == 0:
            report(course, seconds, team)
            if given.picture:
                compare(course, team)


if __name__ == "__main__":
    main()
