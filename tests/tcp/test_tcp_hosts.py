"""Two hosts that only a cable joins: network namespaces of this machine."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from support import digits, launcher, mpi_rows, two_hosts
from support.launcher import agent_of_two
from support.places import ROOT, TESTS
from support.requiring import require_modules

from pgasdl.runtime.launch import mpiexec

HELLO = ROOT / "apps/hello_notify.py"
START = two_hosts.ranks(2)


@pytest.fixture(autouse=True)
def _hosts() -> None:
    two_hosts.require()


def test_the_first_program(tmp_path: Path) -> None:
    """Nothing is set but where the ranks meet: they find that tcp is what joins them."""
    script = f"""{START}
        all python3 {HELLO} 2>&1
    """
    told = two_hosts.succeeded(tmp_path, script, apart=True)
    assert "rank 0 of 2 got 1" in told and "rank 1 of 2 got 0" in told
    assert "tcp to rank" in told, told


LOSES = """
import sys, time
import pgasdl

with pgasdl.init(stopped_after=2.0, heartbeat_ms=200, timeout=60, log="error") as ctx:
    segment = ctx.segment(64)
    ctx.barrier()
    time.sleep(1)
    print("ready", *(x for x in ctx.describe().splitlines() if x.startswith("TCP")), flush=True)
    began = time.monotonic()
    try:
        ctx.notify_waitsome(segment)
    except pgasdl.PeerLost as error:
        waited = time.monotonic() - began
        print(f"rank {ctx.rank} lost {error.rank}: {'in time' if waited < 15 else waited}")
"""


def test_a_pulled_cable(tmp_path: Path) -> None:
    """Each side names the other by the deadline: no packet says that anything is wrong."""
    (tmp_path / "loses.py").write_text(LOSES)
    script = f"""{START}
        rank 0 python3 loses.py >first 2>&1 & first=$!
        rank 1 python3 loses.py >second 2>&1 & second=$!
        until grep -q ready first && grep -q ready second; do sleep 0.1; done
        cable down
        wait $first $second || true
        cat first second
    """
    told = two_hosts.succeeded(tmp_path, script, apart=True)
    for number in (1, 2):
        place = rf"ready TCP at port \d+ of 198\.18\.0\.{number} \(cable\)"
        assert re.search(place, told), told
    assert "rank 0 lost 1: in time" in told and "rank 1 lost 0: in time" in told, told


MEETS = """
import pgasdl
try:
    with pgasdl.init(stopped_after=1.0, log="error") as ctx:
        ctx.barrier()
except pgasdl.PeerLostError as error:
    print(error)
"""


@pytest.mark.full
def test_a_peer_that_cannot_be_reached(tmp_path: Path) -> None:
    """The error says at which address, and what the kernel said: here a wrong interface."""
    (tmp_path / "meets.py").write_text(MEETS)
    script = f"""{START}
        PGASDL_TCP_INTERFACE=lo rank 1 python3 meets.py & second=$!
        rank 0 python3 meets.py
        wait $second
    """
    told = two_hosts.succeeded(tmp_path, script, apart=True)
    why = r"no connection with rank 1: (127\.0\.0\.1|\[::1\]):\d+: Connection refused"
    assert re.search(rf"^rank 1 died \({why}\)", told, re.M), told


@pytest.mark.full
def test_two_agents_of_torchrun(tmp_path: Path) -> None:
    """Trained over tcp, to the bits of shared memory."""
    saved = tmp_path / "weights.npz"
    agent = agent_of_two("node1", digits.training(saved))
    script = f"""
        on node1 {agent} & first=$!
        on node2 {agent} & second=$!
        ended $first $second
    """
    told = two_hosts.succeeded(tmp_path, script, apart=True)
    assert "the same bits on 2 ranks" in told
    digits.require_same(2, saved)


@pytest.mark.full
@pytest.mark.parametrize("kind", sorted(mpiexec.LAUNCHERS))
def test_mpis_launcher(tmp_path: Path, kind: str) -> None:
    """It starts a rank on each host; tcp carries their bytes."""
    if why := mpi_rows.missing(kind):
        pytest.skip(why)
    found = mpi_rows.ROWS[kind].found()
    variables = found.environ() | {"PGASDL_TRANSPORT": "tcp", "PGASDL_STORE": "node1:29500"}
    handed = ["PYTHONPATH", "PATH", "PGASDL_SECRET_FILE", *variables]
    far, hosts = two_hosts.shell(tmp_path), ["node1:1", "node2:1"]
    line = [*mpi_rows.across(found, hosts, far, "cable", handed), "python3", str(HELLO)]
    script = f"export -f on\n{shlex.join(line)} 2>&1"
    told = two_hosts.succeeded(tmp_path, script, apart=True, **variables)
    assert "rank 0 of 2 got 1" in told and "rank 1 of 2 got 0" in told, told
    assert "tcp to all ranks (asked for)" in told, told


SLOW = TESTS / "tcp/programs/slow.py"


@pytest.mark.full
def test_local_sgd_over_a_slow_link(tmp_path: Path) -> None:
    """50 ms and 100 Mbit/s, one way: it trains to the bits of one host."""
    app = [str(ROOT / "apps/local_sgd.py"), "--rounds", "10"]
    require_modules("torch", "sklearn")
    serve = f"python3 {TESTS}/support/tcp_proxy.py"
    script = f"""{two_hosts.ranks(2)}
        for node in node1 node2; do
          mkdir $node
          on $node {serve} $node 0.05 12.5e6 &
          until [ -e $node/proxy ]; do sleep 0.1; done
        done
        all bash -c 'python3 {SLOW} $(cat $(hostname)/proxy) {shlex.join(app)}'
    """
    told = two_hosts.succeeded(tmp_path, script, apart=True)
    here = launcher.run("-n", "2", *app, timeout=120, OMP_NUM_THREADS="1")
    said = r"rank (\d: .*?sha256 \w{16})"  # two ranks may write into one line
    wanted = sorted(re.findall(said, here.stdout))
    assert sorted(re.findall(said, told)) == wanted
    assert len(wanted) == 2
