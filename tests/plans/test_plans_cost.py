"""Plans' costs, from their own steps, against the papers' equations: exact, for many p, q, n."""

from __future__ import annotations

from fractions import Fraction

import formulas
import pytest

from pgasdl.errors import PlanError
from pgasdl.plans import PLANS, Plan, Span, Wait, build, build_all
from pgasdl.plans.cost import Model, Pair, finish_times, predict
from pgasdl.plans.plan import begins

# Two expressions that are linear in these four figures and agree at all of these points agree
# everywhere: the points are in general position, and every figure is exact.
POINTS = [
    (Fraction(7, 3), Fraction(1, 1000), Fraction(4, 1000), Fraction(1, 3000)),
    (Fraction(1, 9), Fraction(3, 700), Fraction(11, 700), Fraction(1, 90)),
    (Fraction(101, 2), Fraction(1, 17), Fraction(1, 3), Fraction(2, 19)),
    (Fraction(13), Fraction(5, 23), Fraction(31, 29), Fraction(0)),
    (Fraction(0), Fraction(1, 31), Fraction(5, 37), Fraction(7, 41)),
]


@pytest.mark.parametrize("round_robin", [False, True])
@pytest.mark.parametrize(("p", "q"), [(2, 1), (4, 2), (8, 2), (8, 4), (16, 4), (32, 8), (16, 16)])
def test_halving_and_doubling_is_equations_2_to_6_of_swcaffe(
    p: int, q: int, round_robin: bool
) -> None:
    for factor in (1, 3):
        count = 16 * p * factor
        numbering = {"group_size": q} if round_robin else {}
        plans = build_all("halving-doubling", p, count, **numbering)
        for alpha, beta1, beta2, gamma in POINTS:
            inside, across = Pair(0, beta1, alpha), Pair(0, beta2, alpha)
            model = Model(inside, across, per_node=q, gamma=gamma)
            expected = formulas.halving_doubling(
                p, q, 4 * count, alpha, beta1, beta2, gamma, round_robin=round_robin
            )
            assert predict(plans, model) == expected


@pytest.mark.parametrize(("kind", "formula"), [("reduce-scatter", "halving"), ("all-gather", "")])
@pytest.mark.parametrize(("p", "q"), [(4, 2), (8, 4), (16, 2)])
def test_each_phase_is_equation_3_or_4_after_its_credits(
    kind: str, formula: str, p: int, q: int
) -> None:
    count = 48 * p
    plans = build_all("halving-doubling", p, count, kind=kind)
    for alpha, beta1, beta2, gamma in POINTS:
        model = Model(Pair(alpha, beta1), Pair(alpha, beta2), per_node=q, gamma=gamma)
        figures = (p, q, 4 * count, alpha, beta1, beta2)
        if formula:
            expected = formulas.halving(*figures, gamma, round_robin=False)
        else:
            expected = formulas.doubling(*figures, round_robin=False)
        # A one-way plan begins with credits; the paper assumes that buffers are free.
        assert predict(plans, model) == expected + alpha


@pytest.mark.parametrize("p", range(3, 14))
@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_a_chain_is_equation_2_of_s_caffe(p: int, n: int) -> None:
    count = 64 * n
    plans = build_all("chain", p, count, kind="reduce", chunks=n)
    for alpha, beta, _, gamma in POINTS:
        # In the paper a rank's t(c) is one piece of work: it receives, adds and forwards.
        model = Model(Pair(0, beta, alpha), gamma=gamma, blocking=True)
        t_c = alpha + beta * 4 * 64 + gamma * 4 * 64
        credit = alpha
        assert predict(plans, model) == formulas.chunked_chain_reduce(p, n, t_c) + credit


@pytest.mark.parametrize("p", [2, 3, 4, 5, 7, 8, 9, 16, 31, 32, 33])
def test_a_binomial_tree_is_equation_1_of_s_caffe(p: int) -> None:
    count = 160
    plans = build_all("tree", p, count, kind="reduce", chunks=1)
    for alpha, beta, _, gamma in POINTS:
        model = Model(Pair(alpha, beta))
        credit = alpha
        t_b = alpha + beta * 4 * count
        # If p is no power of two, some branches are shorter than in the equation.
        assert predict(plans, model) <= formulas.binomial_reduce(p, t_b) + credit
        if p & (p - 1) == 0:
            assert predict(plans, model) == formulas.binomial_reduce(p, t_b) + credit
            # With additions the plan costs log P (log P - 1) / 2 of them more: it adds all children
            # in one pass, which is less memory traffic, but begins when the last has come.
            levels = formulas.log2(p)
            added = Model(Pair(alpha, beta), gamma=gamma)
            t_b += gamma * 4 * count
            late = gamma * 4 * count * levels * (levels - 1) / 2
            expected = formulas.binomial_reduce(p, t_b) + credit + late
            assert predict(plans, added) == expected


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8, 13])
def test_gdraa_takes_two_latencies_and_each_block_once_each_way(p: int) -> None:
    count = 16 * p * 5
    plans = build_all("gdraa", p, count)
    for alpha, beta, _, gamma in POINTS:
        model = Model(Pair(alpha, beta), gamma=gamma)
        assert predict(plans, model) == formulas.gdraa(p, 4 * count, alpha, beta, gamma)


@pytest.mark.parametrize("p", [4, 8, 32])
def test_the_crossover_of_chain_and_tree_is_where_the_equations_have_it(p: int) -> None:
    # S-Caffe: chains for small P and large buffers, trees for large P and small buffers.
    model = Model(Pair(0, Fraction(1, 1000), Fraction(10)))
    winners = set()
    for count in (160, 1600, 16_000, 160_000, 1_600_000):
        chain = predict(build_all("chain", p, count, kind="reduce", chunks=10), model)
        tree = predict(build_all("tree", p, count, kind="reduce", chunks=1), model)
        t_b, t_c = (10 + Fraction(4 * n, 1000) for n in (count, count // 10))
        by_chain = formulas.chunked_chain_reduce(p, 10, t_c)
        by_tree = formulas.binomial_reduce(p, t_b)
        assert (chain < tree) == (by_chain < by_tree)
        winners.add(chain < tree)
    assert winners == {False, True}


def test_late_ranks_hold_up_the_others() -> None:
    plans = build_all("gdraa", 4, 640)
    model = Model(Pair(Fraction(1), Fraction(1, 100)))
    together = predict(plans, model)
    times = finish_times(plans, model, begin=[0, 0, Fraction(50), 0])
    assert max(times) > 50 and max(times) <= 50 + together


def test_the_wire_halves_what_it_can() -> None:
    plans = build_all("gdraa", 4, 6400, wire=True)
    model = Model(Pair(Fraction(0), Fraction(1)))
    whole, half = (max(finish_times(plans, model, item=4, wire_item=w)) for w in (4, 2))
    assert half * 2 == whole


def test_a_lane_that_waits_for_ever_is_named() -> None:
    good = build("gdraa", 0, 2, 64)
    lost = Plan("lost", 0, 1, 64, ((Wait(3),),), {"data": 64}, 4)
    assert good.lanes and Span("data", 0)
    with pytest.raises(PlanError, match=r"lost, rank 0, lane 0, step 0 \(Wait 3\)"):
        finish_times([lost], Model(Pair(0, 1)))


@pytest.mark.parametrize("p", [2, 3, 4, 8, 16])
def test_owners_of_staged_arrays_pay_off_above_a_count(p: int) -> None:
    """They save loads of peers' memory, and cost copies and a latency: so with two ranks never."""
    count = 16 * p
    for alpha, remote, copy, _ in POINTS:
        model = Model(Pair(alpha, 0), copy=copy, remote=remote)
        of_all, by_owners = (
            predict(build_all("staged", p, count, owners=owners), model) for owners in (0, 1)
        )
        saved = Fraction((p - 1) * (p - 2), p) * remote - Fraction(p - 2, p) * copy
        assert of_all - by_owners == saved * 4 * count - alpha


def test_by_default_staged_arrays_have_owners_where_they_pay_off() -> None:
    """Latencies that grow with the number of ranks, as on two cores: microseconds."""
    for p in (3, 4, 8, 16):
        model = Model(Pair(0.8 * p, 0), copy=0, remote=4e-5)
        for count in (1 << 8, 1 << 11, 1 << 17, 1 << 20):
            of_all, by_owners, default = (
                predict(build_all("staged", p, count, piece=count, **options), model)
                for options in ({"owners": 0}, {"owners": 1}, {})
            )
            assert default == min(of_all, by_owners)
    # Two ranks have them by measurement: the model does not know what a line's last user costs.
    for count, owners in ((512, 0), (513, 1), (1 << 20, 1)):
        assert build("staged", 0, 2, count) == build("staged", 0, 2, count, owners=owners)


@pytest.mark.parametrize("sizes", [0, -3, (2, 0), ()])
def test_a_group_has_a_rank(sizes: int | tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="each has one at least"):
        begins(7, sizes)
    with pytest.raises(PlanError):
        PLANS["gdraa-nodes"].inbox(8, 100, group_size=sizes)
