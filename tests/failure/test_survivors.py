"""After a loss the survivors form a group and go on."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from support.forking import Job
from tiers import full

SETTINGS = {"PGASDL_TIMEOUT": "20"}


def check_use(event: dict[str, object], members: list[int]) -> None:
    assert event["ranks"] == members
    assert event["counted"] == len(members)
    assert event["sums"] == [*[sum(members)] * 3, len(members)]


def lose_one_after_another(ranks: Job, victims: list[int]) -> None:
    ranks.said("working")
    left = [0, 1, 2, 3]
    for number, victim in enumerate(victims):
        ranks.signal(victim, signal.SIGKILL)
        left.remove(victim)
        ranks.said(f"recovered {number}", left)
        for rank in left:
            check_use(ranks.event(rank, f"recovered {number}"), left)
            lost = ranks.event(rank, "lost")
            assert lost["rank"] == victim, ranks.transcript()
            # The text does not name ranks whose loss was accepted before.
            assert not any(f"rank {old}" in lost["text"] for old in victims[:number]), lost["text"]
    assert ranks.ended(left) == [0, 0], ranks.transcript()


def lose_at_once(ranks: Job, first: int, second: int) -> None:
    """No group of survivors has the second, however late it is killed."""
    ranks.signal(second, signal.SIGSTOP)
    ranks.signal(first, signal.SIGKILL)
    ranks.signal(second, signal.SIGKILL)


@pytest.mark.parametrize("victims", [[3, 1], [0, 3], [1, 0]])
def test_two_losses_one_after_another(job: Callable[..., Job], victims: list[int]) -> None:
    lose_one_after_another(job("goes_on.py", 4, 2, **SETTINGS), victims)


@pytest.mark.parametrize("victims", [[0, 1], *full([[0, 3], [2, 0]])])
def test_another_rank_serves_after_the_loss_of_the_one_that_did(
    job: Callable[..., Job], victims: list[int]
) -> None:
    """Under torchrun and srun rank 0 serves the store, and the survivors need one."""
    lose_one_after_another(job("goes_on.py", 4, 2, torchrun=True, **SETTINGS), victims)


@pytest.mark.parametrize("victim", [0, 2])
def test_loss_while_groups_are_formed(job: Callable[..., Job], victim: int) -> None:
    """The store may report it before the context of a survivor has noticed it."""
    ranks = job("forms_groups.py", 8, torchrun=True, **SETTINGS)
    ranks.said("working")
    ranks.signal(victim, signal.SIGKILL)
    left = [rank for rank in range(8) if rank != victim]
    ranks.said("recovered", left)
    for rank in left:
        assert ranks.event(rank, "lost")["rank"] == victim, ranks.transcript()
        assert ranks.event(rank, "recovered")["ranks"] == left, ranks.transcript()
    assert ranks.ended(left) == [0] * 7, ranks.transcript()


def test_next_rank_to_serve_is_lost_too(job: Callable[..., Job]) -> None:
    ranks = job("goes_on.py", 4, 1, torchrun=True, **SETTINGS)
    ranks.said("working")
    lose_at_once(ranks, 0, 1)
    for rank in (2, 3):
        check_use(ranks.event(rank, "recovered 0"), [2, 3])
    assert ranks.ended([2, 3]) == [0, 0], ranks.transcript()


def test_two_losses_at_once(job: Callable[..., Job]) -> None:
    ranks = job("goes_on.py", 4, 1, **SETTINGS)
    ranks.said("working")
    lose_at_once(ranks, 1, 2)
    for rank in (0, 3):
        check_use(ranks.event(rank, "recovered 0"), [0, 3])
    assert ranks.ended([0, 3]) == [0, 0], ranks.transcript()


def test_last_survivor_goes_on_alone(job: Callable[..., Job]) -> None:
    ranks = job("goes_on.py", 2, 1, **SETTINGS)
    ranks.said("working")
    ranks.signal(0, signal.SIGKILL)
    check_use(ranks.event(1, "recovered 0"), [1])
    assert ranks.ended([1]) == [0]


@pytest.mark.parametrize("victim", [0, 2])
def test_idle_rank_takes_the_place_of_one_that_died(job: Callable[..., Job], victim: int) -> None:
    ranks = job("rescue.py", 4, victim, **SETTINGS)
    left = [rank for rank in range(4) if rank != victim]
    for rank in left:
        finished = ranks.event(rank, "finished")
        assert finished["ranks"] == left and finished["step"] == 10
        assert finished["total"] == 9 * 3, ranks.transcript()
        assert finished["health"][victim] == "died"
    assert ranks.ended(left) == [0, 0, 0]
