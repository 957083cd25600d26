"""The messages, and the numbers that travel in the exchange: without a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pgasdl.jobs
from pgasdl import ConfigError, JobError, MismatchError, PlanError
from pgasdl.jobs.mailbox import PLACES
from pgasdl.jobs.messages import COMMANDS, Command, Event, Metrics
from pgasdl.jobs.training import MODULUS, TrainingJob

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)  # fmt: skip
NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9_./-]{0,63}", fullmatch=True)


@given(NAMES.filter(lambda name: name not in COMMANDS), VALUES)
def test_a_command_goes_there_and_back(name: str, value: Any) -> None:
    command = Command(name, value)
    assert Command.from_json(json.loads(json.dumps(command.as_json()))) == command


@given(VALUES)
def test_what_is_no_command_is_refused(document: Any) -> None:
    with pytest.raises(JobError) as refused:
        Command.from_json(document)
    assert refused.value.status == 422


@pytest.mark.parametrize(
    ("document", "field", "why"),
    [
        ({"value": 1}, "name", "missing"),
        ({"name": "a b"}, "name", "does not match"),
        ({"name": "x", "other": 1}, "other", "unknown"),
        ({"name": "x", "version": 2}, "version", "not within 1 to 1"),
        ({"name": "pause", "value": 1}, "value", "no null"),
        ({"name": "set", "value": {"name": "x"}}, "value.value", "missing"),
        ({"name": "set", "value": {"name": "x", "value": []}}, "value.value", "no boolean or"),
        ({"name": "x", "value": "y" * 4095}, "value", "4097 bytes"),
        ({"name": "x", "value": float("nan")}, "value", "no JSON"),
    ],
)
def test_a_refusal_names_the_field(document: Any, field: str, why: str) -> None:
    with pytest.raises(JobError, match=why) as refused:
        Command.from_json(document)
    assert refused.value.field == field
    Command.from_json({"name": "x", "value": "y" * 4094})


def test_metrics_and_events() -> None:
    numbers = Metrics(3, 1.5, {"loss": 2, "inf": float("inf")}).as_json()["numbers"]
    assert numbers == {"loss": 2.0, "inf": None}
    assert len(Event(0, 1.0, "long", "x" * 5000).as_json()["text"]) == 4096
    assert Event(0, 1.0, "file", "caf\udce9").as_json()["text"] == "caf?"
    with pytest.raises(JobError, match="iteration"):
        Event(-1, 1.0, "x").as_json()
    with pytest.raises(JobError, match="numbers"):
        Metrics(1, 1.0, {"a b": 1.0}).as_json()


# --- numbers in the exchange


class Written:
    """A mailbox in which all commands are already."""

    posts = False

    def __init__(self, *commands: Command) -> None:
        self.commands = commands

    def read(self, number: int) -> Command:
        return self.commands[number - 1]

    def tell(self, number: int, *, failed: bool) -> None:
        pass


def job_of(size: int, *commands: Command) -> TrainingJob:
    mailbox: Any = Written(*commands)
    context: Any = SimpleNamespace(rank=1, config=SimpleNamespace(job_link="link"))
    group: Any = SimpleNamespace(size=size, ranks=range(size))
    return TrainingJob(context, group, mailbox, None, None)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_numbers_are_exact_for_every_size(dtype: Any) -> None:
    """The mean of one number and zeros: their sum times 1/size, or each divided before."""
    numbers = np.arange(MODULUS)
    for size in range(1, 1025):
        sums = numbers.astype(dtype)
        accumulated = np.float32 if np.dtype(dtype).itemsize < 4 else dtype
        scaled = (sums.astype(accumulated) * accumulated(1 / size)).astype(dtype)
        divided = (sums / dtype(size)).astype(dtype)
        for means in (scaled, divided):
            assert (np.rint(means.astype(np.float64) * size) == numbers).all(), size


@given(st.integers(1, 1024), st.lists(st.integers(0, PLACES), max_size=30))
def test_commands_are_obeyed_two_iterations_later(size: int, posted: list[int]) -> None:
    """Rank 0 posts some in each iteration, as many as are let."""
    commands = [Command("own", number) for number in range(sum(posted))]
    job, did = job_of(size, *commands), []
    job.on("own")(lambda value: did.append((job.iteration, value)))
    total, at, element = 0, {}, np.zeros(1, np.float32)
    obeyed_when_given, read_by_all = 0, 0
    for iteration in range(len(posted) + 3):
        assert job.begin(iteration)
        more = posted[iteration] if iteration < len(posted) else 0
        for _ in range(min(more, PLACES - (total - read_by_all))):
            at[total] = iteration
            total += 1
        job.take(element) if iteration == 0 else None
        job.give(element)
        obeyed_when_given = len(did)
        element[0] = np.float32(total % MODULUS) * np.float32(1 / size)
        job.take(element)
        read_by_all = obeyed_when_given
    assert did == [(at[number] + 2, number) for number in range(total)]


def test_what_a_loop_can_do_wrong() -> None:
    job, element = job_of(2, Command("own")), np.zeros(1, np.float32)
    for name, why in [("pause", "the loop itself"), ("a b", "does not match")]:
        with pytest.raises(ConfigError, match=why):
            job.on(name)
    job.on("x")(print)
    with pytest.raises(ConfigError, match="already"):
        job.on("x")
    job.begin(0)
    job.give(element)
    with pytest.raises(PlanError, match="take the last one"):
        job.give(element)
    job.begin(1)
    with pytest.raises(PlanError, match=r"rank 1: iteration 2 begins.*iteration 0"):
        job.begin(2)
    element[0] = 0.5
    job.take(element)
    with pytest.raises(MismatchError, match="rank 1 has no function for 'own', as rank 0"):
        job.begin(2)


def test_what_is_wrong_is_so_on_every_rank() -> None:
    job = job_of(2)
    job.begin(np.int64(3))  # type: ignore[arg-type]
    assert type(job.iteration) is int
    with pytest.raises(TypeError):
        job.begin(1.5)  # type: ignore[arg-type]
    with pytest.raises(JobError, match="iteration"):
        job.begin(-1)
    with pytest.raises(JobError, match=r"val acc \(top-1\)"):
        job.metrics({"val acc (top-1)": 0.5})
    with pytest.raises(TypeError):
        job.metrics({"loss": "0.5"})  # type: ignore[dict-item]
    with pytest.raises(JobError, match="name: 'epoch 1 ended'"):
        job.event("epoch 1 ended")


def test_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    import pgasdl.loopback

    monkeypatch.delenv("PGASDL_JOB_LINK", raising=False)

    def rank(ctx: pgasdl.Context) -> list[int]:
        threads = threading.active_count()
        with pgasdl.jobs.connect(ctx, paused=True) as job:
            assert job.elements == 0
            job.on("own")(print)
            job.metrics({"loss": 1.0})
            job.event("word")
            made = list(_trained(job))
        assert threading.active_count() <= threads + 1  # the other rank's
        return made

    def _trained(job: TrainingJob) -> Iterator[int]:
        for iteration in job.iterations(3, 6):
            job.give(np.zeros(0))
            job.take(np.zeros(0))
            yield iteration

    assert pgasdl.loopback.run(2, rank) == [[3, 4, 5]] * 2
