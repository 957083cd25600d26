"""Run random programs: ``python tests/random_programs/run.py --seeds 0:1000``.

Prints every seed that fails with its error and its program, and ends with status 1 if any does.
"""

from __future__ import annotations

import argparse
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import sanitizers
from generator import FEATURES
from program import PER_WORLD, Program
from ways import LAUNCHES, made, worlds

sys.path.append(str(Path(__file__).parents[1]))
from support.environment import ONE_THREAD, environment
from support.launcher import command as launched
from support.starting import kill_group

HERE = Path(__file__).parent
WAYS = ("loopback", *LAUNCHES)
_AT_ONCE = 16 * PER_WORLD  # seeds for one process whose threads are the ranks
# Lines that belong to no error: progress, and flight records of ranks that only heard of a loss.
_NOISE = r"^(seed \d+|done|flight record.*|(pgasdl )?rank \d+(:| waits in) .*| +-[\d.]+ us .*)\n"
_SHOWN = 6000  # last characters of a failed program's output


@dataclass(frozen=True)
class Manner:
    """How programs are run."""

    way: str = "loopback"
    features: Sequence[str] = FEATURES
    sanitizer: str = ""
    timeout: float = 20.0  # of every wait
    patience: float = 120.0  # until a program that prints nothing counts as hung
    steps: Sequence[int] = ()  # of a single program; none: all
    environ: dict[str, str] = field(default_factory=dict)

    def program(self, seed: int) -> Program:
        """The program that runs under this seed."""
        program = made(self.way, seed, self.features)
        return program.only(self.steps) if self.steps else program


@dataclass(frozen=True)
class Failure:
    """A seed that failed, and how."""

    seed: int
    text: str

    @property
    def reason(self) -> str:
        """Its error in a line."""
        lines = [line for line in self.text.splitlines() if re.match(r"[\w.]+(Error|Interrupt)?: ",
                 line) or "Sanitizer: " in line]  # fmt: skip
        return next((x for x in lines if "Sanitizer" in x), lines[0] if lines else self.text[-200:])


def batches(manner: Manner, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Ranges of seeds, one for each start: processes run one world, threads run several."""
    if manner.way != "loopback":
        programs = [manner.program(seed) for seed in range(first, last)]
        yield from ((first + begin, first + end) for begin, end in worlds(programs))
        return
    while first < last:
        end = min(last, first - first % _AT_ONCE + _AT_ONCE)
        yield first, end
        first = end


def command(manner: Manner, first: int, last: int) -> list[str]:
    """The command that runs the seeds."""
    features = "" if tuple(manner.features) == FEATURES else ",".join(manner.features)
    worker = [
        str(HERE / "ways.py"), manner.way, str(first), str(last), str(manner.timeout), features,
        ",".join(map(str, manner.steps)),
    ]  # fmt: skip
    if manner.way == "loopback":
        return [sys.executable, *worker]
    size = str(manner.program(first).world.size)
    return launched("-n", size, "--timeout", str(manner.timeout), *LAUNCHES[manner.way], *worker)


def variables_of(manner: Manner) -> dict[str, str]:
    """The environment of that command, with the sanitizer's variables if there is one."""
    created = {"PGASDL_MPI_WINDOWS": "created"} if manner.way.endswith("-created") else {}
    kept = environment(**(ONE_THREAD | created | manner.environ))
    return kept | (sanitizers.environment(manner.sanitizer) if manner.sanitizer else {})


def ends(manner: Manner, last: int) -> int:
    """How many times "done" is printed if all is well."""
    if manner.way == "loopback":
        return 1
    program = manner.program(last - 1)
    return program.world.size - (program.leaves == "kill")


def attempt(manner: Manner, first: int, last: int) -> Failure | None:
    """Run a range of seeds until one fails."""
    process = subprocess.Popen(
        command(manner, first, last), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=variables_of(manner), cwd="/", start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    text, hung = b"", False
    with selectors.DefaultSelector() as selector, process.stdout:
        selector.register(process.stdout, selectors.EVENT_READ)
        deadline = time.monotonic() + manner.patience
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                if hung:
                    kill_group(process.pid)
                    break
                hung = True
                os.killpg(process.pid, signal.SIGABRT)  # faulthandler writes its stacks
                deadline = time.monotonic() + 10
                continue
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                break
            text += part
            if not hung:
                deadline = time.monotonic() + manner.patience
    process.wait()
    words = text.decode(errors="replace")
    n_ends = len(re.findall(r"^done$", words, re.MULTILINE))
    if not hung and n_ends == ends(manner, last) and "Sanitizer: " not in words:
        return None
    begun = [int(seed) for seed in re.findall(r"^seed (\d+)$", words, re.MULTILINE)]
    named = [int(seed) for seed in re.findall(r"step \d+ of seed (\d+)", words)]
    seed = named[0] if named else begun[-1] if begun else first
    said = re.sub(_NOISE, "", words, flags=re.MULTILINE)
    how = "it hung" if hung else f"status {process.returncode}"
    return Failure(seed, f"{said[-_SHOWN:]}\n{how}")


def failures(manner: Manner, first: int, last: int, most: int = 1 << 30) -> Iterator[Failure]:
    """All seeds of a range that fail, one after another."""
    while first < last and most > 0:
        found = attempt(manner, first, last)
        if found is None:
            return
        yield found
        most -= 1
        first = max(first, found.seed) + 1


def fails_alone(manner: Manner, seed: int, steps: Sequence[int], times: int = 3) -> Failure | None:
    """The failure of these steps alone, in one of several runs, or None."""
    alone = Manner(manner.way, manner.features, manner.sanitizer, manner.timeout, manner.patience,
                   steps, manner.environ)  # fmt: skip
    return next(filter(None, (attempt(alone, seed, seed + 1) for _ in range(times))), None)


def shrunk(manner: Manner, seed: int, patience: float = 300.0) -> list[int] | None:
    """The steps without which a program no longer fails; None if it does not fail alone."""
    kept = list(range(len(manner.program(seed).steps)))
    if fails_alone(manner, seed, kept) is None:
        return None
    deadline = time.monotonic() + patience
    for step in reversed(kept):
        fewer = [each for each in kept if each != step]
        if fewer and time.monotonic() < deadline and fails_alone(manner, seed, fewer):
            kept = fewer
    return kept


def report(manner: Manner, failure: Failure, shrink: bool) -> None:
    """Print a failure, its program, and how to repeat it."""
    print(f"=== seed {failure.seed} failed: {failure.reason}\n{failure.text}")
    program = manner.program(failure.seed)
    kept = shrunk(manner, failure.seed) if shrink else None
    if shrink and kept is None:
        begin = failure.seed - failure.seed % PER_WORLD
        print(f"It does not fail alone; --seeds {begin}:{failure.seed + 1} runs those before, too.")
    print(program.only(kept) if kept else program)
    steps = f" --steps {','.join(map(str, kept))}" if kept else ""
    print(f"again: --way {manner.way} --seeds {failure.seed}:{failure.seed + 1}{steps}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", default="0:1000", help="FROM:TO")
    parser.add_argument("--way", choices=WAYS, default="loopback")
    parser.add_argument("--sanitizer", choices=("", *sanitizers.KINDS), default="")
    parser.add_argument("--only", default=",".join(FEATURES), help=f"of {','.join(FEATURES)}")
    parser.add_argument("--steps", default="", help="numbers of the steps to keep, of one seed")
    parser.add_argument("--timeout", type=float, default=20.0, help="of every wait, seconds")
    parser.add_argument("--patience", type=float, default=120.0, help="until it is taken for hung")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--most", type=int, default=20, help="failures, then it ends")
    parser.add_argument("--shrink", action="store_true", help="drop steps while it still fails")
    given = parser.parse_args()
    first, last = map(int, given.seeds.split(":"))
    manner = Manner(
        given.way, tuple(given.only.split(",")), given.sanitizer, given.timeout, given.patience,
        [int(step) for step in given.steps.split(",") if step],
    )  # fmt: skip
    n_failed = 0
    with ThreadPoolExecutor(given.jobs) as pool:
        began = time.monotonic()
        ranges = list(batches(manner, first, last))
        for found in pool.map(lambda r: list(failures(manner, *r, given.most)), ranges):
            for failure in found:
                report(manner, failure, given.shrink)
                n_failed += 1
            if n_failed >= given.most:
                pool.shutdown(cancel_futures=True)
                break
    print(f"{last - first} programs, {n_failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if n_failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
