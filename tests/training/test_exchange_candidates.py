"""Plans that are tried while training: every layer keeps its fastest, the same on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

import numpy as np
import pytest
from support.ranks import on_ranks

from pgasdl import Context, GradientExchange, PlanError, loopback
from pgasdl.errors import MismatchError, PeerLostError, PgasTimeoutError
from pgasdl.training.autotune import ROUNDS

T = TypeVar("T")
SHAPES = [((10,), "float32"), ((1000,), "float32"), ((20_000,), "float32")]


@pytest.mark.parametrize("candidates", [("gdraa", "tree"), ("gdraa", "ring", "gdraa-direct")])
@pytest.mark.parametrize("bucket_bytes", [0, 3000])
def test_candidates_are_tried_and_all_ranks_keep_one(
    candidates: tuple[str, ...], bucket_bytes: int
) -> None:
    iterations = len(candidates) * (ROUNDS + 1) + 5

    def program(ctx: Context) -> str:
        exchange = GradientExchange(
            ctx, SHAPES[:3], candidates=candidates, bucket_bytes=bucket_bytes
        )
        assert " or ".join(candidates) in exchange.plan
        for iteration in range(iterations):
            for layer in range(3):
                exchange.gradient(layer)[...] = ctx.rank + iteration
            # Every rank in an order of its own.
            for place in range(3):
                exchange.ready((place + ctx.rank) % 3)
            for layer in range(3):
                exchange.wait(layer)
                assert np.all(exchange.gradient(layer) == iteration + 1.0)
        return exchange.plan

    kept = loopback.run(3, program, seed=5, delay=2, reorder=True, late_source=True)
    assert len(set(kept)) == 1 and " or " not in kept[0]


def test_each_bucket_keeps_the_candidate_that_is_fastest_on_its_slowest_rank() -> None:
    slow = [0, 1, 0]  # of each bucket: the candidate that is slow on rank 2

    def program(ctx: Context) -> str:
        exchange = GradientExchange(ctx, [((1024,), "float32")] * 3, candidates=("ring", "gdraa"))
        tuner = exchange._autotune
        assert tuner is not None
        for iteration in range(tuner.limit + 2):
            for layer in range(3):
                exchange.ready(layer)
            for layer in range(3):
                exchange.wait(layer)
                assert len(tuner.times[layer]) == min(iteration + 1, 2 * ROUNDS)
                # The clock as it would be if one candidate were slow there.
                if iteration < 2 * ROUNDS and ctx.rank == 2 and iteration % 2 == slow[layer]:
                    tuner.times[layer][-1] += 1.0
        return exchange.plan

    assert loopback.run(4, program) == ["gdraa x1, ring x1, gdraa x1"] * 4


def exchanged(exchange: GradientExchange, iteration: int, layers: Sequence[int]) -> None:
    """One iteration of two ranks, of these layers alone."""
    for layer in layers:
        exchange.gradient(layer)[...] = exchange.context.rank + iteration
        exchange.ready(layer)
    for layer in layers:
        exchange.wait(layer)
        assert np.all(exchange.gradient(layer) == iteration + 0.5)


def test_a_layer_holds_up_no_choice_but_its_own() -> None:
    """One is exchanged in every iteration, one in every second, one is frozen."""

    def program(ctx: Context) -> list[str]:
        exchange = GradientExchange(ctx, [((5,), "float32")] * 3, candidates=("gdraa", "tree"))
        tuner = exchange._autotune
        assert tuner is not None
        kept = []
        for iteration in range(2 * tuner.limit):
            exchanged(exchange, iteration, [0, 1] if iteration % 2 else [0])
            for layer in range(2):
                times = tuner.times[layer]
                # The clock as it would be if the first candidate were slow.
                if len(times) % 2:
                    times[-1] = 1.0
            if iteration + 1 in (tuner.limit - 1, tuner.limit, 2 * tuner.limit):
                kept.append(exchange.plan)
        exchange.close()
        return kept

    both = "gdraa or tree"
    wanted = [both, f"tree x1, {both} x2", f"tree x2, {both} x1"]
    assert loopback.run(2, program) == [wanted] * 2


def test_no_rank_chooses_by_what_it_alone_has_measured() -> None:
    """A layer is due to be decided where another's times are missing, on one rank only."""

    def program(ctx: Context) -> tuple[str, float]:
        exchange = GradientExchange(ctx, [((5,), "float32")] * 2, candidates=("tree", "gdraa"))
        tuner = exchange._autotune
        assert tuner is not None
        for iteration in range(tuner.limit):
            exchanged(exchange, iteration, [0, 1] if iteration < 2 * ROUNDS - 1 else [0])
            if iteration % 2 == 0 and iteration < 2 * ROUNDS:
                tuner.times[0][-1] = 1.0
        exchange.gradient(0)[...] = ctx.rank
        exchange.ready(1)
        if ctx.rank == 0:
            exchange.wait(1)
        exchange.ready(0)
        if ctx.rank == 1:
            exchange.wait(1)
        exchange.wait(0)
        return exchange.plan, float(exchange.gradient(0)[0])

    assert loopback.run(2, program) == [("gdraa x1, tree or gdraa x1", 0.5)] * 2


def test_candidates_of_ranks_that_only_try() -> None:
    """Every call that times out is made again: the making, and each wait."""

    def tried(call: Callable[[], T]) -> T:
        while True:
            with suppress(PgasTimeoutError):
                return call()

    def program(ctx: Context) -> str:
        tries = 0.0 if ctx.rank == 0 else None
        names = "gdraa", "tree"
        exchange = tried(lambda: GradientExchange(ctx, SHAPES[:2], candidates=names, timeout=tries))
        for iteration in range(2 * (ROUNDS + 1) + 2):
            for layer in range(2):
                exchange.gradient(layer)[...] = ctx.rank + iteration
                exchange.ready(layer)
            for layer in range(2):
                tried(partial(exchange.wait, layer, timeout=tries))
                assert np.all(exchange.gradient(layer) == iteration + 0.5)
        return exchange.plan

    first, second = loopback.run(2, program, seed=3, delay=2, reorder=True)
    assert first == second and " or " not in first


def test_threads_that_wait_for_one_bucket_with_candidates() -> None:
    def program(ctx: Context) -> str:
        layers = [((5,), "float32")] * 4
        exchange = GradientExchange(ctx, layers, bucket_bytes=1 << 20, candidates=("gdraa", "tree"))
        with ThreadPoolExecutor(4) as threads:
            for iteration in range(2 * (ROUNDS + 1) + 2):
                for layer in range(4):
                    exchange.gradient(layer)[...] = ctx.rank + iteration
                    exchange.ready(layer)
                assert list(threads.map(exchange.wait, range(4))) == [None] * 4
                for layer in range(4):
                    assert np.all(exchange.gradient(layer) == iteration + 0.5)
        return exchange.plan

    first, second = loopback.run(2, program)
    assert first == second and " or " not in first


def test_an_exchange_whose_making_timed_out_is_made_by_the_same_call() -> None:
    late = threading.Event()

    def program(ctx: Context) -> str:
        def make(timeout: float) -> GradientExchange:
            return GradientExchange(ctx, SHAPES[:2], candidates=("gdraa", "tree"), timeout=timeout)

        if ctx.rank == 0:
            with pytest.raises(PgasTimeoutError):
                make(0.05)
            late.set()
        assert late.wait(30)
        with make(30) as exchange:
            exchanged(exchange, 0, [0, 1])
            return exchange.plan

    assert loopback.run(2, program) == ["gdraa or tree"] * 2


@pytest.mark.parametrize("finish", [True, False])
def test_an_exchange_is_closed_while_candidates_are_tried(finish: bool) -> None:
    """After any number of iterations, in the middle of one; beside another that goes on."""

    def program(ctx: Context) -> str:
        names = "gdraa", "tree"
        other = GradientExchange(ctx, SHAPES[:2], candidates=names)
        for iterations in range(2 * (ROUNDS + 1) + 1):
            exchange = GradientExchange(ctx, SHAPES[:2], candidates=names)
            for iteration in range(iterations):
                exchanged(exchange, iteration, [0, 1])
            exchange.ready(1)
            exchange.close(finish=finish)
            exchanged(other, iterations, [1, 0])
        return other.plan

    first, second = loopback.run(2, program, mapped=False)
    assert first == second and " or " not in first


@on_ranks(2)
def test_candidates_that_cannot_be_are_refused(ctx: Context) -> None:
    with pytest.raises(PlanError, match="no plan named 'nope'"):
        GradientExchange(ctx, SHAPES[:1], candidates=("nope", "tree"))
    with pytest.raises(PlanError, match="gdraa-direct is no candidate for kind 'reduce'"):
        GradientExchange(ctx, SHAPES[:1], kind="reduce", candidates=("tree", "gdraa-direct"))


def test_different_candidates_are_a_mismatch() -> None:
    def program(ctx: Context) -> str:
        names = ("tree", "gdraa") if ctx.rank else ("gdraa", "tree")
        try:
            GradientExchange(ctx, SHAPES[:1], candidates=names)
        except (MismatchError, PeerLostError) as error:
            return type(error).__name__
        return "made"

    assert loopback.run(2, program) == ["MismatchError"] * 2
