"""``apps/peers_bench.py``: its options, its jobs of other libraries, and what it compares."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.launcher import run
from support.mpi_rows import missing
from support.places import APPS, TESTS
from tiers import full

from pgasdl import Context, loopback, models
from pgasdl.errors import MismatchError, UnavailableError
from pgasdl.runtime.launch import mpiexec
from pgasdl.tools.bench.output import Output

FAST = ("--repeat", "1", "--seconds", "0.002")


@pytest.fixture(scope="module", autouse=True)
def app() -> Iterator[Any]:
    """The app as a module."""
    sys.path.insert(0, str(APPS))
    import peers_bench

    yield peers_bench
    sys.path.remove(str(APPS))


@pytest.fixture
def jobs(app: Any) -> Any:
    from bench import jobs

    return jobs


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("allgather", "invalid choice"),
        ("allreduce --sizes 7", "size 7"),
        ("allreduce --repeat 0", "--repeat 0"),
        ("allreduce --peers gloo,mpch", "no peer 'mpch'; did you mean 'mpich'? there are mpich, "),
        ("model resnet5", "no model 'resnet5'; did you mean 'resnet50'? there are alexnet, "),
    ],
)
def test_refused(app: Any, arguments: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app.options(arguments.split())
    assert word in capsys.readouterr().err


def test_pieces_and_buckets_hold_everything(app: Any) -> None:
    counts = models.layers("resnet50")
    assert sum(app.pieces(sum(counts))) == sum(counts)
    assert max(app.pieces(10 << 20)) * 4 == 4 << 20 and min(app.pieces(sum(counts))) > 0
    buckets = app.buckets(counts, 25 << 20)
    assert [layer for layers in buckets for layer in layers] == list(range(len(counts)))
    assert len(buckets) in (5, 6)


@pytest.mark.gate
@pytest.mark.parametrize("op", full(["allreduce", "write_notify"], quick=1))
def test_peers_take_turns(op: str) -> None:
    """Peers that are installed are measured; the others are named with the reason."""
    words = [op, "--sizes", "1K", "--peers", "openmpi,gloo", "--json", *FAST]
    done = run("--no-prefix", "-n", "2", str(APPS / "peers_bench.py"), *words, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = {row["who"]: row for row in json.loads(done.stdout)}
    assert all(row["op"] == op and row["bytes"] == 1024 and row["us"] > 0 for row in rows.values())
    for name in ("openmpi", "gloo"):
        assert (name in rows) == (f"no peer    {name}: " not in done.stderr)
    ours = {"allreduce": {"segment", "array"}, "write_notify": {"core", "python"}}[op]
    assert ours <= set(rows)


@pytest.mark.full
@pytest.mark.parametrize(
    ("op", "first", "nbytes"),
    [
        ("product", "blas", 4 * 64 * 64),
        ("remap", "copy", 4 * 64 * 64),
        ("reduce", "pgasdl", 64),
        ("broadcast", "pgasdl", 64),
    ],
)
def test_what_not_every_peer_has(op: str, first: str, nbytes: int) -> None:
    """Of those that are installed; the first row is what the machine can do."""
    words = [op, "--sizes", "64", "--json", *FAST]
    done = run("--no-prefix", "-n", "2", str(APPS / "peers_bench.py"), *words, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    names = [row["who"] for row in rows]
    assert names[0] == first and "pgasdl" in names
    assert all(row["op"] == op and row["bytes"] == nbytes and row["us"] > 0 for row in rows)
    from bench.jobs import serving

    for name in serving(op):
        assert (name in names) == (f"no peer    {name}: " not in done.stderr)


def test_the_best_of_a_group_is_shown(
    app: Any, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench.comparison import Comparison

    from pgasdl.tools.bench.session import Session
    from pgasdl.tools.bench.turns import Contender

    def fixed(name: str, us: float) -> Contender:
        return Contender(name, lambda calls: [us] * calls, calls=2)

    def program(ctx: Context) -> list[dict[str, Any]]:
        comparison = Comparison(Session(ctx, Output(ctx.rank), rounds=2))
        comparison.begin()
        groups = {"pgasdl": [fixed("tree", 2.0)], "openmpi": [fixed("", 4.0), fixed("cma", 3.0)]}
        comparison.measure("sum", 8, groups)
        return comparison.rows

    ours, theirs = loopback.run(1, program)[0]
    assert (ours["variant"], theirs["variant"], theirs["us"]) == ("tree", "cma", 3.0)
    assert capsys.readouterr().out.splitlines()[-1].split()[-3:] == ["1.50", "alone", "cma"]


def test_a_peer_with_wrong_sums(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS / "unit"))
    peer = jobs.Peer("wrong", 2, jobs.PeerKind("wrong_peer", ()))
    try:
        with pytest.raises(
            MismatchError, match=r"wrong: allreduce: 5.0 came out as {.*}: no figures"
        ):
            peer.collective([1], 3, paced=True, fill_share=1.0)
    finally:
        peer.close()


def test_a_peer_that_is_not_installed(jobs: Any) -> None:
    with pytest.raises(UnavailableError, match="gloo: no_such_module is not installed"):
        jobs.Peer("gloo", 2, jobs.PeerKind("no.worker", ("no_such_module",)))


def test_another_mpi_is_not_taken_for_it(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if why := missing("mpich"):
        pytest.skip(why)
    other = replace(mpiexec.LAUNCHERS["mpich"], says="Open MPI")
    monkeypatch.setitem(mpiexec.LAUNCHERS, "mpich", other)
    with pytest.raises(UnavailableError, match=r"of Open MPI were started, .* of MPICH"):
        jobs.Peer("mpich", 2)


def test_a_peer_that_does_not_start(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(jobs.PEER_KINDS, "gloo", jobs.PeerKind("bench.peers.none", ()))
    started, missing = jobs.start(["gloo"], 1)
    assert started == []
    assert "No module named bench.peers.none" in missing[0]


def test_rdma_needs_verbs_between_two_ranks(app: Any) -> None:
    given = app.options(["rdma"])
    with pytest.raises(UnavailableError, match="two ranks with --transport verbs"):
        loopback.run(2, lambda ctx: app.beside_calls(ctx, given, Output(ctx.rank)))
