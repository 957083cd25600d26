"""The native engine: equal to the exact model where no link is shared, and right where one is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pgasdl import _native, models
from pgasdl import simulate as sim
from pgasdl.config import Config
from pgasdl.errors import ConfigError, PlanError
from pgasdl.plans import PLANS, Put, build_all
from pgasdl.plans.cost import Model, Pair, finish_times
from pgasdl.simulate import library
from pgasdl.simulate.machine import Level, Machine
from pgasdl.simulate.program import OUTLINES, encoded, program, workspace_bytes

MODEL = Model(
    Pair(1.5e-6, 1e-10, 2e-7), Pair(2e-6, 4e-10, 3e-7), per_node=3, gamma=5e-11, copy=3e-11,
    remote=2e-11, update=7e-11,
)  # fmt: skip
VARIANTS = [
    (name, kind) for name, spec in PLANS.items() for kind in spec.kinds if kind not in ("sum",)
]


def machine_of(model: Model, size: int) -> Machine:
    """The model's machine: without shared links."""
    assert model.across is not None

    def level(name: str, group: list[int], pair: Pair) -> Level:
        return Level(name, group, float(pair.latency), float(pair.beta), float(pair.startup))

    node = level("node", [rank // model.per_node for rank in range(size)], model.inside)
    levels = (node, level("machine", [0] * size, model.across))
    costs = [float(cost) for cost in (model.gamma, model.copy, model.remote, model.update)]
    return Machine("model", levels, *costs, model.blocking)


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(("name", "kind"), VARIANTS)
def test_the_engine_agrees_with_the_exact_model(name: str, kind: str, blocking: bool) -> None:
    model = replace(MODEL, blocking=blocking)
    phase = {"phase": 0} if PLANS[name].phases > 1 else {}
    for size in (1, 2, 5, 8):
        for count in (40, 3000):
            # No two messages come at one moment: either could be taken first.
            begin = [1e-6 * (rank * 7 % 5 + rank / 977) for rank in range(size)]
            plans = build_all(name, size, count, kind=kind, **phase)
            exact = finish_times(plans, model, begin=begin)
            engine = sim.simulate(
                machine_of(model, size), [sim.Exchange(name, count, kind=kind)], begin=begin
            )
            assert engine.finish[0] == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("name", OUTLINES)
@pytest.mark.parametrize("count", [1, 40, 1000, 4097])
def test_an_outline_is_the_plan(name: str, count: int) -> None:
    for size in (2, 3, 5, 8, 17):
        exchange = sim.Exchange(name, count)
        machine = sim.supernodes(size, per_group=3, oversubscription=2, gamma=5e-11)
        begin = [3e-7 * (rank * 5 % 7) for rank in range(size)]
        levels, costs = machine.native()
        runs = []
        for made in (
            encoded(build_all(name, size, count), size),
            OUTLINES[name](exchange, size),
        ):
            runs.append(
                _native.simulate(
                    levels, costs, [made], [0], [(1, 0, 0.0), (2, 0, 0.0)], begin, [1.0] * size
                )
            )
        assert list(runs[0][0]) == list(runs[1][0])
        assert runs[0][4] == runs[1][4]


def test_an_over_subscribed_link_is_the_bottleneck() -> None:
    # Two groups of 4 exchange data, once through a link with a quarter of their bandwidth.
    exchange = sim.Exchange("all-to-all", 8 << 20, kind="all-to-all")
    full = sim.supernodes(8, per_group=4, oversubscription=1, latency=0.0)
    tight = sim.supernodes(8, per_group=4, oversubscription=4, latency=0.0)
    across = 4 * 4 * 4 * (1 << 20)
    for machine, over in ((full, 1), (tight, 4)):
        outcome = sim.simulate(machine, [exchange])
        nbytes, busy = outcome.levels["group"]
        assert outcome.levels["machine"][0] == 2 * across and nbytes == 2 * 12 * 4 * (1 << 20)
        assert busy == pytest.approx(across * over / 4 / 10e9)
        assert outcome.seconds >= busy
    assert sim.simulate(tight, [exchange]).seconds < 1.5 * across / 10e9


def test_round_robin_numbering_keeps_supernodes_links_free() -> None:
    machine = sim.supernodes(64, per_group=16, oversubscription=4, gamma=5e-11)
    adjacent = sim.Exchange("halving-doubling", 1 << 20)
    round_robin = replace(adjacent, options=(("group_size", 16),))
    one, other = (sim.simulate(machine, [each]) for each in (adjacent, round_robin))
    assert other.seconds < 0.6 * one.seconds
    # Bytes across, of all ranks and both phases: (p - q) n / p of each rank, or (p / q - 1) n / p.
    assert one.levels["machine"][0] == 2 * 48 * (4 << 20)
    assert other.levels["machine"][0] == 2 * 3 * (4 << 20)


def test_rails_carry_more_than_one() -> None:
    exchange = sim.Exchange("gdraa", 1 << 20)
    one, two = (
        sim.simulate(sim.numa_nodes(16, rails=rails), [exchange]).seconds for rails in (1, 2)
    )
    assert 1.5 < one / two < 2.05


def test_skewed_ranks_and_computation() -> None:
    machine = sim.flat(8)
    exchange = sim.Exchange("tree", 1000)
    application = [sim.Compute(1e-3), sim.Start(0), sim.Compute(2e-3), sim.Join(0)]
    even = sim.simulate(machine, [exchange], application)
    assert even.seconds == pytest.approx(3e-3)  # hidden behind the second computation
    slow = [1.0] * 7 + [4.0]
    late = sim.simulate(machine, [exchange], application, slow=slow)
    assert late.finish.min() > 4e-3 and late.moments[2, 0] == pytest.approx(3e-3)
    assert late.seconds == pytest.approx(12e-3)


def test_exchanges_that_go_on_in_turns() -> None:
    # One second for a message, and for adding it; two layers of ten seconds.
    exchange = sim.Exchange("tree", 16, kind="update")
    layers = [sim.Start(0), sim.Compute(10), sim.Compute(10), sim.Join(0)]
    machine = sim.flat(2, latency=0, bandwidth=64, gamma=1 / 64)
    free = sim.simulate(machine, [exchange], layers)
    assert free.finish[0].tolist() == [3, 3] and free.moments[-1].tolist() == [20, 20]
    held = sim.simulate(replace(machine, turns=True), [exchange], layers)
    # The root adds at 10, which holds it up; the result is taken at the end of the other's layer.
    assert held.moments[1].tolist() == [11, 10]
    assert held.finish[0].tolist() == [21, 20] and held.moments[-1].tolist() == [21, 20]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PlanError, match="no plan named 'nope'"):
        sim.simulate(sim.flat(2), [sim.Exchange("nope", 4)])
    with pytest.raises(ConfigError, match="begin: 2 figures"):
        sim.simulate(sim.flat(2), [sim.Exchange("tree", 4)], begin=[0.0])
    with pytest.raises(ValueError, match="a range leaves the ops"):
        one = np.zeros((1, 4), np.int64)
        _native.Program(one, np.array([[[0, 2]]]), np.zeros(0, np.int64), 1, 1)


def test_a_plan_that_hangs_is_told() -> None:
    plans = build_all("tree", 4, 64)
    broken = encoded([*plans[:3], replace(plans[3], lanes=((),))], 4)  # rank 3 sends nothing up
    levels, costs = sim.flat(4).native()
    actions = [(1, 0, 0.0), (2, 0, 0.0)]
    *_, stuck = _native.simulate(levels, costs, [broken], [0], actions, [0.0] * 4, [1.0] * 4)
    assert "rank 0, job 0, lane 0 waits for 2 flags, of which 1 are ever raised" in stuck


@pytest.mark.full
def test_a_thousand_ranks() -> None:
    # ResNet-50's largest layers only; `pgasdl sim` runs all layers within a minute.
    largest = sorted(models.layers("resnet50"))[-3:]
    machine = sim.flat(1024, startup=2e-7, gamma=5e-11)
    outcome = sim.simulate(machine, [sim.Exchange("gdraa", n) for n in largest])
    assert outcome.messages == 3 * 2 * 1023 * 1024
    least = sum(2 * 4 * n * 1023 / 1024 for n in largest) / 10e9
    assert least < outcome.seconds < 20 * least
    halving = sim.simulate(machine, [sim.Exchange("halving-doubling", largest[-1])])
    assert halving.messages == 1024 * 20
    assert halving.seconds < 2 * 4 * largest[-1] / 10e9 + 1e-3


@pytest.mark.full
def test_sixteen_thousand_ranks_of_a_tree() -> None:
    size = 16384
    outcome = sim.simulate(sim.MACHINES["fat-tree"](size), [sim.Exchange("tree", 1000)])
    assert outcome.messages == 2 * (size - 1)
    assert 14 * 1.5e-6 < outcome.seconds < 1e-3


def test_programs_are_shared() -> None:
    exchange = sim.Exchange("tree", 100)
    assert program(exchange, 4) is not None
    outcome = sim.simulate(sim.flat(4), [exchange] * 50)
    assert outcome.messages == 50 * 6


@pytest.mark.parametrize(("name", "count"), [("gdraa", 40), ("gdraa", 1000), ("tree", 1000)])
@pytest.mark.parametrize("size", [1, 2, 7, 200])
def test_traffic_of_the_busiest_rank(name: str, count: int, size: int) -> None:
    """Messages add up over exchanges, neighbours do not; an outline has the plan's."""
    messages = [0] * size
    neighbours: list[set[int]] = [set() for _ in range(size)]
    spec = PLANS[name]
    for rank in range(size):
        plan = spec.build(rank, size, count, kind="average", wire=False)
        for _, _, step in plan.steps():
            if isinstance(step, Put):
                messages[rank] += 1
                neighbours[rank].add(step.peer)
                neighbours[step.peer].add(rank)
    outcome = sim.simulate(sim.flat(size), [sim.Exchange(name, count)] * 3)
    assert outcome.messages_of_rank == 3 * max(messages)
    assert outcome.neighbours == max(len(each) for each in neighbours)


def test_workspaces_of_plans() -> None:
    assert workspace_bytes(sim.Exchange("gdraa", 1 << 20), 1024) == 4 * 1023 * 1024
    assert workspace_bytes(sim.Exchange("gdraa-direct", 1 << 20), 4) == 0


def test_costs_of_the_library_are_shown() -> None:
    """tests/unit/test_crowd.py and tests/contract/test_contract_footprint.py check the figures."""
    config = Config.from_environment()
    costs = library.costs([3, 5000], config)
    shown = library.table(costs).splitlines()
    assert [line.split()[-2:] for line in shown[:1]] == [["of", "5000"]]
    memory = [sum(library.memory(n, config).values()) / 1e6 for n in (3, 5000)]
    for column in (0, 1):
        total = sum(float(line.split()[column - 2].replace(",", "")) for line in shown[1:6])
        assert total == pytest.approx(memory[column], abs=0.003)
    assert shown[-1].split()[-2:] == ["2", "28"]


def test_slots_of_large_groups_are_small() -> None:
    """A slot has 256 bytes at least, which the description of a segment needs."""
    slots = {n: _native.group_memory(n, False, 0)["slots"] for n in (2, 128, 1024, 4096, 16384)}
    header = 56
    assert slots[2] == 2 * 2 * (1024 + 8192 + 2 * header)
    assert slots[128] == 2 * 128 * (1024 + 8192 + 2 * header)
    assert slots[1024] == 2 * 1024 * 2 * (1024 + header)
    assert slots[4096] == 2 * 4096 * 2 * (256 + header)
    assert slots[16384] == 4 * slots[4096] < 21e6
