"""Every plan passes the checker; blocks, the table of plans and validation do what they promise."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
from plan_tools import TELLING, VARIANTS, Variant, averages_quick, with_step
from tiers import full

from pgasdl.errors import PlanError
from pgasdl.plans import (
    PLANS,
    Call,
    Flush,
    Plan,
    PlanSpec,
    Put,
    Reduce,
    Span,
    Wait,
    blocks,
    build,
    build_all,
    describe,
    register,
    validate,
    validate_all,
)
from pgasdl.plans.algorithms.shapes import RoundRobin
from pgasdl.plans.check import assert_ok, check

FEW = range(2, 5)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(
    "sizes", full([FEW, range(1, 6), range(6, 10), range(10, 18), range(18, 34)], quick=1), ids=str
)
def test_every_plan_is_right(variant: Variant, sizes: range) -> None:
    """All sizes up to 33; many ranks run few counts, not all with values: they add nothing new."""
    for size in sizes:
        counts = [0, 1, 5, 17, 100, 1000] if size <= 5 else [17, 1000]
        if sizes == FEW:
            counts = [5, 100]
        if size > 9:
            # Sums and updates are built as averages are.
            if variant.kind in ("sum", "update") or (variant.wire and size not in (17, 33)):
                continue
            counts = [(1000, 17, 300)[size % 3]]
        if variant.wire and variant.name == "gdraa" and size <= 9:
            counts.append(20_000)  # casts block by block
        layers, seeds = (2, 2) if size <= 4 else (1, int(size <= 9 or size % 8 < 2))
        iterations = 3 if size <= 9 else 2
        for count in counts:
            phases = variant.phases(size, count)
            findings = variant.check(
                phases, size, iterations=iterations, layers=layers, seeds=seeds
            )
            assert findings == [], (size, count)


@pytest.mark.parametrize("name", [n for n, spec in PLANS.items() if "root" in spec.options])
@pytest.mark.parametrize("size", full([2, 3, 6], quick=1))
def test_any_root(name: str, size: int) -> None:
    for kind in PLANS[name].kinds:
        for root in range(size):
            assert_ok(name, size, 100, kind=kind, root=root)


@pytest.mark.parametrize("variant", averages_quick(v for v in TELLING if not v.wire), ids=str)
def test_many_schedules_agree_with_the_proof(variant: Variant) -> None:
    plans = variant.plans(4, 100)
    assert variant.check(plans, 4, iterations=5, layers=3, seeds=6) == []


def test_supernodes_are_numbered_round_robin() -> None:
    for size in range(1, 40):
        for group_size in range(1, size + 2):
            numbering = RoundRobin(size, group_size)
            ranks = [numbering.rank(node) for node in range(size)]
            assert [numbering.node(rank) for rank in ranks] == list(range(size))
            assert ranks == sorted(ranks, key=lambda r: (r % group_size, r // group_size))


@pytest.mark.parametrize(("size", "q"), [(16, 4), (16, 2), (32, 8), (8, 8)])
def test_bytes_across_supernodes_are_as_in_swcaffe(size: int, q: int) -> None:
    """Per node and direction: (p - q) n/p adjacent, (p/q - 1) n/p round-robin."""
    count = 16 * size
    for group_size, blocks_across in ((1, size - q), (q, size // q - 1)):
        for plan in build_all("halving-doubling", size, count, group_size=group_size):
            puts = [step for _, _, step in plan.steps() if isinstance(step, Put)]
            away = sum(put.n for put in puts if put.peer // q != plan.rank // q)
            assert away == 2 * 16 * blocks_across
            assert sum(put.n for put in puts) == 2 * 16 * (size - 1)


def test_cost_does_not_depend_on_the_count() -> None:
    assert_ok("gdraa", 3, 10**12)
    assert_ok("tree", 3, 10**12, wire=True)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 100, 1000, 4096, 10**9 + 7])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 17])
def test_blocks_are_fair_and_aligned(count: int, size: int) -> None:
    parts = blocks(count, size)
    assert len(parts) == size
    assert sum(n for _, n in parts) == count
    end = 0
    for offset, n in parts:
        assert offset == end
        assert n == 0 or offset % 16 == 0
        end += n
    lengths = [n for _, n in parts]
    assert lengths == sorted(lengths, reverse=True) or count % 16
    assert lengths[0] == max(lengths)
    assert max(lengths) - min(lengths) <= 31


def test_blocks_of_any_alignment() -> None:
    assert blocks(10, 4, 1) == [(0, 3), (3, 3), (6, 2), (8, 2)]
    assert blocks(5, 3) == [(0, 5), (5, 0), (5, 0)]


@pytest.mark.parametrize("name", PLANS)
def test_nothing_to_do_takes_no_steps(name: str) -> None:
    for kind in PLANS[name].kinds:
        assert build(name, 2, 5, 0, kind=kind).lanes == ()
        update = ((Call("update", Span("data", 0), 100),),)
        assert build(name, 0, 1, 100, kind=kind).lanes == (update if kind == "update" else ())


def test_a_tiny_layer_takes_few_steps() -> None:
    ends = [plan.lanes[0] for plan in build_all("gdraa-direct", 2, 8)]
    assert [type(step) for step in ends[0]] == [Wait, Reduce, Put]
    assert [type(step) for step in ends[1]] == [Put, Wait]
    assert len(build("gdraa", 1, 17, 8).lanes[0]) == 2
    assert len(build("tree", 1, 2, 8).lanes[0]) == 2


def test_sums_are_in_rank_order_and_in_one_pass() -> None:
    for plan in build_all("gdraa", 5, 1000):
        passes = [step for step in plan.lanes[0] if isinstance(step, Reduce)]
        assert len(passes) == 1
        own = [place for place, span in enumerate(passes[0].srcs) if span.buffer == "data"]
        assert own == [plan.rank]
        slots = [span.offset for span in passes[0].srcs if span.buffer == "inbox"]
        assert slots == sorted(slots)
        assert len(set(slots)) == 4


def test_memory_named_by_the_plans() -> None:
    assert build("gdraa-direct", 0, 4, 1000, kind="update").buffers == {
        "data": 1000,
        "weights": 1000,
    }
    assert build("gdraa", 0, 3, 48).buffers == {"data": 48, "inbox": 32}
    assert build("tree", 1, 5, 10).buffers == {"data": 10, "inbox": 48}
    assert build("chain", 1, 5, 100, chunks=4).buffers == {"data": 100, "inbox": 112}
    assert build("kary", 1, 9, 10).buffers == {"data": 10, "inbox": 32}
    assert build("chain-binomial", 1, 9, 10, chain_size=2).buffers["inbox"] == 4 * 16
    assert build("halving-doubling", 1, 4, 64).buffers == {"data": 64, "inbox": 48}
    assert build("tree", 1, 5, 10, kind="broadcast").buffers == {"data": 10}
    wire = build("gdraa", 0, 3, 48, wire=True).buffers
    assert wire == {"data": 48, "wire_in": 32, "wire_out": 48}


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (("hexagon", 0, 2, 8), {}, "hexagon"),
        (("gdraa", 2, 2, 8), {}, "rank 2"),
        (("gdraa", -1, 2, 8), {}, "rank -1"),
        (("gdraa", 0, 0, 8), {}, "0 ranks"),
        (("gdraa", 0, 2, -1), {}, "-1"),
        (("gdraa", 0, 2, 8), {"kind": "max"}, "max"),
        (("gdraa", 0, 2, 8), {"root": 1}, "root"),
        (("tree", 0, 2, 8), {"root": 2}, "root 2"),
        (("gdraa-direct", 0, 2, 8), {"wire": True}, "wire"),
        (("tree", 0, 2, 8), {"wire": True, "kind": "reduce"}, "wire precision is for"),
        (("tree", 0, 2, 8), {"chunks": -1}, "chunks is -1"),
        (("kary", 0, 2, 8), {"arity": 0}, "arity is 0"),
        (("chain-chain", 0, 2, 8), {"chain_size": 0}, "chain_size is 0"),
        (("chain", 0, 2, 8), {"kind": "all-gather"}, "no kind 'all-gather'"),
        (("halving-doubling", 0, 2, 8), {"group_size": 0}, "group_size is 0"),
        (("halving-doubling", 0, 4, 8), {"group_size": 2, "kind": "all-gather"}, "block r"),
        (("gdraa-nodes", 0, 4, 8), {"direct": 2}, "direct is 2"),
        (("multi-stage", 0, 4, 8), {"kind": "broadcast", "stages": 0}, "stages is 0"),
        (("tree", 0, 4, 8), {"root": (1, 2)}, "root is .*, an integer is needed"),
        (("tree", 0, 4, 8), {"chunks": 1.5}, "chunks is 1.5, an integer is needed"),
        (("tree", 0, 4, 8), {"group_size": ()}, "group_size is 0"),
        (("tree", 0, 4, 8), {"group_size": (1, 0)}, "group_size is 0"),
        (("gdraa-nodes", 0, 4, 8), {"group_size": [1, 3]}, "or a tuple of them, is needed"),
    ],
)
def test_arguments_that_cannot_be(
    arguments: tuple[str, int, int, int], options: dict[str, object], text: str
) -> None:
    with pytest.raises(PlanError, match=text):
        build(*arguments, **options)  # type: ignore[arg-type]


def test_a_plan_from_outside_is_registered_once() -> None:
    spec = PlanSpec("mine", PLANS["tree"].build, "a tree by another name", options=("root",))
    register(spec)
    try:
        with pytest.raises(PlanError, match="mine"):
            register(spec)
        assert check("mine", 3, 100, root=2) == []
    finally:
        del PLANS["mine"]
    for wrong in (
        {"kinds": ("max",)},
        {"works_on": "paper"},
        {"inbox_pieces": 4},
        {"works_on": "mapped", "mapped": False},
    ):
        with pytest.raises(PlanError, match=next(iter(wrong))):
            register(replace(spec, **wrong))  # type: ignore[arg-type]


def test_nodes_do_not_load_what_is_in_wire_precision() -> None:
    plans = [build("gdraa-nodes", 1, 4, 100, wire=True, direct=direct) for direct in (0, 1)]
    assert plans[0] == plans[1] and not plans[1].mapped


def test_plans_are_immutable_and_repeatable() -> None:
    plan = build("gdraa", 1, 3, 100)
    assert plan == build("gdraa", 1, 3, 100)
    assert hash(plan) == hash(build("gdraa", 1, 3, 100))
    with pytest.raises(FrozenInstanceError):
        plan.rank = 2  # type: ignore[misc]


DATA = Span("data", 0)
FAULTS = [
    (Put(DATA, 9, 1, DATA, 0), "leaves its buffer"),
    (Put(DATA, 4, 1, Span("data", 5), 0), "leaves its buffer"),
    (Put(Span("data", -1), 4, 1, DATA, 0), "leaves its buffer"),
    (Put(DATA, 4, 3, DATA, 0), "peer 3"),
    (Put(DATA, 4, -1, DATA, 0), "peer -1"),
    (Put(DATA, 4, 0, DATA, 0), "itself"),
    (Put(DATA, -1, 1, DATA, 0), "n is -1"),
    (Put(DATA, 0, 1, DATA, None), "nothing to do"),
    (Put(DATA, 4, 1, DATA, 2), "notification 2"),
    (Put(DATA, 4, 1, DATA, -1), "notification -1"),
    (Put(DATA, 4, 1, Span("data", 0, 1), 0), "peer alone"),
    (Put(Span("data", 0, 1), 4, 1, DATA, 0), "remote"),
    (Put(Span("outbox", 0), 4, 1, DATA, 0), "outbox"),
    (Put(DATA, 4, 1, Span("wire_in", 0), 0), "dtype"),
    (Wait(2), "notification 2"),
    (Reduce((DATA,), (Span("inbox", 0),), 0), "n is 0"),
    (Reduce((), (DATA,), 4), "destination"),
    (Reduce((DATA,), (), 4), "source"),
    (Reduce((DATA,), (DATA,), 4, float("nan")), "scale"),
    (Reduce((DATA,), (Span("data", 2),), 4), "overlaps"),
    (Reduce((DATA, Span("data", 3)), (Span("inbox", 0),), 4), "overlap"),
    (Reduce((DATA,), (Span("data", 0, 1),), 4), "mapped"),
    (Reduce((DATA,), (Span("data", 0, 0),), 4), "own copy"),
    (Call("save", DATA, 4), "save"),
    (Call("update", DATA, 4), "weights"),
    (Call("update", DATA, 0), "n is 0"),
]


@pytest.mark.parametrize(("step", "text"), FAULTS)
def test_validate_names_the_step_and_its_fault(step: object, text: str) -> None:
    buffers = {"data": 8, "inbox": 8, "wire_in": 8}
    plan = Plan("bad", 0, 2, 8, ((Flush(), step),), buffers, 2)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="plan bad, rank 0, lane 0, step 1") as error:
        validate(plan)
    assert text in str(error.value)


def test_validate_refuses_what_comes_twice() -> None:
    put = Put(DATA, 4, 1, DATA, 0)
    with pytest.raises(PlanError, match=r"step 1 .*again"):
        validate(Plan("bad", 0, 2, 8, ((put, put),), {"data": 8}, 1))
    with pytest.raises(PlanError, match=r"lane 1, step 0 .*again"):
        validate(Plan("bad", 0, 2, 8, ((Wait(0),), (Wait(0),)), {"data": 8}, 1))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"name": ""}, "name"),
        ({"rank": 2}, "not a rank"),
        ({"count": -1}, "below 0"),
        ({"buffers": {"data": 7}}, "not 8"),
        ({"buffers": {"data": 8, "inbox": -1}}, "-1"),
    ],
)
def test_validate_checks_the_header(change: dict[str, object], text: str) -> None:
    plan = replace(Plan("bad", 0, 2, 8, (), {"data": 8}, 0), **change)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=text):
        validate(plan)


def test_validate_all_compares_the_ranks() -> None:
    plans = build_all("gdraa", 3, 100)
    with pytest.raises(PlanError, match="2 plans for 3 ranks"):
        validate_all(plans[:2])
    with pytest.raises(PlanError, match="place 0"):
        validate_all([plans[1], plans[0], plans[2]])
    with pytest.raises(PlanError, match="rank 2: count"):
        validate_all([*plans[:2], build("gdraa", 2, 3, 101)])
    with pytest.raises(PlanError, match="no plans"):
        validate_all([])
    with pytest.raises(PlanError, match=r"rank 1.*nobody raises notification 0"):
        validate_all(with_step(plans, 0, 0, 0))
    with pytest.raises(PlanError, match=r"rank 1.*rank 0 never waits for notification 1"):
        validate_all(with_step(plans, 0, 0, 3))


def test_steps_are_described_in_one_line() -> None:
    assert describe(build("gdraa", 1, 3, 40).lanes[0][0]) == (
        "Put data[32:40] -> rank 2 inbox[16:24], notify 1"
    )
    assert describe(Reduce((DATA,), (DATA, Span("inbox", 4)), 4, 0.5)) == (
        "Reduce data[0:4] = 0.5 * (data[0:4] + inbox[4:8])"
    )


def test_check_by_name_needs_a_size() -> None:
    with pytest.raises(PlanError, match="size"):
        check("gdraa", 3)
    with pytest.raises(PlanError, match="kind"):
        check("gdraa", 3, 8, kind="max")
