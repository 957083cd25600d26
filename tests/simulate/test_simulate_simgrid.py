"""The engine against SimGrid (Debian's libsimgrid-dev): the same plans on the same machines.

Where ranks send one message at a time over links of their own, the two agree up to rounding. Else
they differ. In our engine, several messages of a rank leave one after the other, in the order of
posting. In SimGrid they leave together and share the port (as queue pairs of one adapter do), or in
turns, each when the one before has arrived, latency included. Trees and chains are far from the
first order and near the second; GDRAA the other way round. SimGrid shares a link of several ranks
fairly among their messages; our engine passes bytes in the order in which the messages' heads come.
The tolerances are the differences seen against the nearer of the two orders, rounded up.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiers import full

from pgasdl import simulate as sim
from pgasdl.plans import Flush, Plan, Put, Reduce, Wait, build_all
from pgasdl.simulate.machine import Machine

HERE = Path(__file__).parent
RANKS = 16
PLANS = {
    "gdraa": {}, "halving-doubling": {}, "ring": {}, "tree": {"chunks": 1}, "chain": {"chunks": 8},
}  # fmt: skip
COSTS = {"gamma": 5e-11}
MACHINES = {
    "flat": sim.flat(RANKS, **COSTS),
    "supernodes": sim.supernodes(RANKS, per_group=4, oversubscription=4, **COSTS),
    "fat-tree": sim.fat_tree(RANKS, per_leaf=2, leaves_per_pod=4, pod_over=2.0, **COSTS),
    "numa-nodes": sim.numa_nodes(RANKS, per_numa=2, **COSTS),
}
# The largest differences of our engine from the nearer of SimGrid's two orders.
TOLERANCE = {"flat": 0.06, "supernodes": 0.07, "fat-tree": 0.09, "numa-nodes": 0.12}


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None or not Path("/usr/include/simgrid/s4u.hpp").exists():
        pytest.skip("SimGrid is not installed: apt-get install g++ libsimgrid-dev")
    program = tmp_path_factory.mktemp("simgrid") / "replay"
    subprocess.run(
        ["g++", "-O1", "-std=c++17", str(HERE / "simgrid" / "replay.cpp"), "-o", str(program),
         "-lsimgrid"],
        check=True, timeout=120,
    )  # fmt: skip
    return program


def platform(machine: Machine) -> str:
    """The machine as SimGrid takes it: every pair's route, link by link."""
    links: dict[str, tuple[float, str]] = {}
    routes = []
    size = machine.size

    def link(name: str, beta: float, latency: float = 0.0, policy: str = "SHARED") -> str:
        text = f'bandwidth="{1 / beta:.6f}Bps" latency="{latency:.9g}s" sharing_policy="{policy}"'
        links[name] = (beta, text)
        return name

    for source in range(size):
        for target in range(size):
            if source == target:
                continue
            met = next(
                at for at, level in enumerate(machine.levels)
                if level.group[source] == level.group[target]
            )  # fmt: skip
            level = machine.levels[met]
            beta = level.port_beta
            used = [link(f"out{source}-{beta:.3g}", beta)]
            for at in range(met):
                below = machine.levels[at]
                if below.link and (below.through or at + 1 == met):
                    used.append(link(f"up{at}-{below.link[source]}", below.link_beta))
                    used.append(link(f"down{at}-{below.link[target]}", below.link_beta))
            used.append(link(f"in{target}-{beta:.3g}", beta))
            used.append(link(f"wire{met}", 1e-15, level.latency, "FATPIPE"))
            inside = "".join(f'<link_ctn id="{name}"/>' for name in used)
            routes.append(
                f'<route src="h{source}" dst="h{target}" symmetrical="NO">{inside}</route>'
            )
    hosts = "".join(f'<host id="h{rank}" speed="1Gf"/>' for rank in range(size))
    declared = "".join(f'<link id="{name}" {text}/>' for name, (_, text) in links.items())
    return (
        '<?xml version="1.0"?><!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">'
        f'<platform version="4.1"><zone id="all" routing="Full">{hosts}{declared}'
        f"{''.join(routes)}</zone></platform>"
    )


def steps_of(plans: list[Plan], machine: Machine) -> Iterator[str]:
    """Plans as the replay reads them."""
    yield f"ranks {len(plans)}"
    for plan in plans:
        for lane in plan.lanes:
            yield f"lane {plan.rank} {len(lane)}"
            for step in lane:
                match step:
                    case Put(_, n, peer, _, notify):
                        yield f"put {peer} {notify} {4 * n}"
                    case Wait(notification):
                        yield f"wait {notification}"
                    case Reduce(_, srcs, n):
                        yield f"work {machine.gamma * (len(srcs) - 1) * 4 * n:.12g}"
                    case Flush():
                        yield "flush"


@pytest.mark.parametrize("plan", full(PLANS, quick=1))
@pytest.mark.parametrize("name", full(MACHINES, quick=1))
def test_simgrid_agrees(name: str, plan: str, replay: Path, tmp_path: Path) -> None:
    machine, options = MACHINES[name], PLANS[plan]
    count = 1 << 18
    plans = build_all(plan, RANKS, count, **options)
    (tmp_path / "platform.xml").write_text(platform(machine))
    (tmp_path / "steps").write_text("\n".join(steps_of(plans, machine)) + "\n")
    exchange = sim.Exchange(plan, count, options=tuple(options.items()))
    ours = sim.simulate(machine, [exchange]).seconds
    ratios = {}
    for order in ("together", "turns"):
        ran = subprocess.run(
            [str(replay), "platform.xml", "steps", order, "--cfg=network/model:CM02",
             "--cfg=network/TCP-gamma:0", "--cfg=network/crosstraffic:0",
             "--log=root.thres:error"],
            cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True,
        )  # fmt: skip
        ratios[order] = ours / max(map(float, ran.stdout.split()))
    print(
        f"{name:<12} {plan:<18} ours {1e6 * ours:8.1f} us, x SimGrid's together "
        f"{ratios['together']:.3f}, in turns {ratios['turns']:.3f}"
    )
    nearest = min(ratios.values(), key=lambda ratio: abs(ratio - 1))
    assert abs(nearest - 1) <= TOLERANCE[name]
