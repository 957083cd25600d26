"""``pgasdl tune`` and ``pgasdl bench plans``: what is chosen, written and summarized."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tiers import full

import pgasdl.tools.cli
from pgasdl import Context, loopback
from pgasdl.collectives.policy import Choice, Policy
from pgasdl.tools.bench import plans
from pgasdl.tools.bench.calibrate import SIZES, Calibration, Class, calibrate
from pgasdl.tools.bench.output import Output
from pgasdl.tools.bench.plans_cli import cases, charts, summary
from pgasdl.tools.bench.request import Request
from pgasdl.tools.bench.session import Session
from pgasdl.tools.bench.tuner import (
    MOST,
    TUNED,
    Size,
    choices_here,
    choices_of_arrays,
    near,
    predict_all,
    rules_of,
)
from pgasdl.topology import Topology

A, B, C = Choice("gdraa"), Choice("tree"), Choice("chain", (("chunks", 8),))
FAST = ("--repeat", "1", "--seconds", "0.001", "--sizes", "64,4K,64K", "--transport", "loopback")


def size(nbytes: int, **us: float) -> Size:
    return Size(nbytes, {}, {{"a": A, "b": B, "c": C}[name]: value for name, value in us.items()})


def policy_of(sizes: list[Size]) -> Policy:
    return Policy((("allreduce", rules_of(sizes)),))


def test_rules_meet_between_the_sizes() -> None:
    found = policy_of([size(64, a=1, b=2), size(4096, a=3, b=2), size(1 << 20, c=5, b=9)])
    assert str(found) == "allreduce:0-512:gdraa#512-64k:tree#64k-inf:chain(chunks=8)"
    assert Policy.parse(str(found)) == found


def test_a_neighbours_choice_is_kept_within_the_noise() -> None:
    found = policy_of([size(64, a=1.00, b=2), size(4096, a=1.02, b=1.00), size(1 << 20, b=1, a=2)])
    assert str(found) == "allreduce:0-64k:gdraa#64k-inf:tree"
    assert rules_of([]) == ()


def test_oversubscribed_ranks_keep_the_usual_plan_unless_another_is_clearly_faster() -> None:
    sizes = [size(64, a=1.2, b=1), size(4096, a=2, b=1)]
    for each in sizes:
        each.usual = A
    assert str(policy_of(sizes)) == "allreduce:0-512:gdraa#512-inf:tree"


def test_candidates_are_those_near_the_best() -> None:
    assert near({A: 1.0, B: 2.0, C: 50.0, Choice("ring"): 60.0}) == [A, B, C]
    many = {Choice(f"p{n}"): 1.0 + n / 100 for n in range(20)}
    assert len(near(many)) == MOST


def test_figures_depend_on_the_size() -> None:
    steps = (1e-10, 2e-10, 4e-10)
    near_class = Class("one node", 4, 1e-6, 1e-7, steps, steps, steps, steps)
    figures = Calibration(near_class, None, 4, blocking=True)
    assert figures.model(SIZES[0]).inside.beta == pytest.approx(1e-10)
    assert 1e-10 < figures.model(256 << 10).gamma < 2e-10
    assert figures.model(1 << 30).inside.beta == pytest.approx(4e-10)
    assert figures.model(8).blocking and "latency 1.00 us" in str(near_class)
    far = Class("across nodes", 2, 5e-6, 0.0, steps, steps, steps, steps)
    model = Calibration(near_class, far, 2, blocking=False).model(64)
    assert model.pair(0, 1).latency == 1e-6 and model.pair(1, 2).latency == 5e-6


def test_every_plan_is_a_candidate_where_it_can_run() -> None:
    def program(ctx: Context) -> list[str]:
        return [str(choice) for choice in choices_here(ctx)]

    mapped, unmapped = loopback.run(2, program)[0], loopback.run(2, program, mapped=False)[0]
    assert {"gdraa", "gdraa-direct", "tree(chunks=8)", "ring", "halving-doubling"} <= set(mapped)
    assert set(mapped) - set(unmapped) == {"gdraa-direct", "staged"}


def test_trees_and_chains_are_tried_for_reduce_and_broadcast() -> None:
    """S-Caffe's CC and CB with several lengths, wherever they differ."""

    def program(ctx: Context) -> list[set[str]]:
        return [{str(each) for each in choices_here(ctx, k)} for k in ("reduce", "broadcast")]

    reduce, broadcast = loopback.run(6, program)[0]
    trees = {"tree", "chain", "chain(chunks=8)", "chain-chain(chain_size=4)", "chain-binomial"}
    assert trees <= reduce & broadcast and "chain-chain(chain_size=16)" not in reduce
    assert "multi-stage(stages=16)" in broadcast - reduce


def test_candidates_for_arrays_outside_segments() -> None:
    def program(ctx: Context) -> list[str]:
        return sorted(str(choice) for choice in choices_of_arrays(ctx))

    mapped, unmapped = loopback.run(2, program), loopback.run(2, program, mapped=False)
    assert mapped == [["staged(owners=0)", "staged(owners=1)"]] * 2
    assert unmapped == [["gdraa-private", "one-shot"]] * 2


@pytest.mark.parametrize("mapped", [True, False])
def test_a_policy_is_tuned_and_can_be_used(
    tmp_path: Path, mapped: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policy"
    request = Request(
        "tune", 3, "loopback", sizes=(64, 65536), rounds=1, seconds=0.001, policy_file=str(file)
    )
    loopback.run(3, lambda ctx: plans.measure(ctx, request), mapped=mapped)
    said = capfd.readouterr().out
    assert "measured   one node (3 ranks)" in said and f"PGASDL_POLICY=@{file}" in said
    text = file.read_text()
    assert text.startswith("# pgasdl tune: ") and '"latency"' in text
    policy = Policy.parse(text)
    assert [name for name, _ in policy.rules] == [each.name for each in TUNED]
    for each in TUNED:
        assert policy.find(each.name, 0) and policy.find(each.name, 1 << 40)

    def program(ctx: Context) -> tuple[str, str]:
        memory = ctx.segment(64).numpy(np.float32)
        return ctx.describe(), ctx.collective_handle("reduce", memory).plan

    described = loopback.run(3, program, mapped=mapped, policy=f"@{file}")
    due = policy.find("reduce", 64)
    assert due is not None
    assert all(f"policy: {policy}" in each and plan == due.plan for each, plan in described)


def test_predictions_are_for_every_choice() -> None:
    steps = (1e-10,) * 3
    figures = Calibration(
        Class("one node", 3, 1e-6, 0.0, steps, steps, steps, steps), None, 3, False
    )

    def program(ctx: Context) -> dict[Choice, float]:
        return predict_all(ctx, figures, choices_here(ctx), 4096)

    predicted = loopback.run(3, program)[0]
    assert min(predicted.values()) >= 2.0 and predicted[Choice("gdraa-direct")] < 5


@pytest.mark.parametrize(
    ("ranks", "operation"),
    full([({2}, "reduce"), ({2, 3}, "allreduce"), ({3}, "broadcast")], quick=1),
)
def test_bench_plans(
    ranks: set[int], operation: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, n_cases = tmp_path / "out", 3 * len(ranks)
    wanted = ["-n", ",".join(map(str, ranks)), "--operation", operation, *FAST, "--out", str(out)]
    assert pgasdl.tools.cli.main(["bench", "plans", *wanted]) == 0
    said = capfd.readouterr().out
    assert re.search(rf"within 10 % of the best in \d of {n_cases} cases", said)
    rows = json.loads((out / "plans.json").read_text())
    assert {row["ranks"] for row in rows} == ranks
    assert {row["bytes"] for row in rows if row["tuned"]} == {64, 65536}
    assert all(row["us"] > 0 and row["predicted_us"] > 0 for row in rows)
    assert sum(row["chosen"] for row in rows) == n_cases
    assert len(list(out.glob("*.png"))) == 2 * len(ranks)


def test_the_summary_is_of_choices_in_hindsight() -> None:
    def row(plan: str, us: float, chosen: bool) -> dict[str, object]:
        return {"ranks": 2, "transport": "shm", "bytes": 64, "plan": plan, "us": us,
                "predicted_us": 3 * us, "chosen": chosen, "tuned": True}  # fmt: skip

    rows = [row("tree", 1.0, False), row("gdraa", 1.2, True)]
    assert [(a["plan"], b["plan"]) for a, b in cases(rows)] == [("gdraa", "tree")]
    text = "\n".join(summary(rows))
    assert "in 0 of 1 cases (0 %)" in text and "x 1.20" in text and "median 3.00" in text
    assert [chart.name for chart in charts(rows, 2)] == ["plans-2-measured", "plans-2-predicted"]
    assert charts([], 2) == []


def test_tune_over_shm(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # ranks find the installed package, not the source folder
    file = tmp_path / "policy"
    arguments = ["tune", "-n", "2", "--sizes", "64,16K", "--repeat", "1", "--seconds", "0.001"]
    arguments += ["--transport", "shm", "--out", str(file)]
    assert pgasdl.tools.cli.main([*arguments, "--json"]) == 0
    policy = Policy.parse(file.read_text())
    assert policy.find("allreduce", 64) and policy.find("allreduce-array", 64)
    rows = json.loads(capfd.readouterr().out)["sizes"]
    measured = {(row["operation"], row["bytes"]): row["plans"] for row in rows}
    assert set(measured) == {(each.name, n) for each in TUNED for n in (64, 16384)}
    for nbytes in (64, 16384):
        found = {plan["plan"]: plan["us"] for plan in measured["allreduce-array", nbytes]}
        assert {"staged(owners=0)", "staged(owners=1)"} <= set(found)
        assert min(found.values()) > 0
    assert pgasdl.tools.cli.main([*arguments, "--print-request"]) == 0
    assert Request.load(capfd.readouterr().out).op == "tune"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["tune", "-n", "0"], "-n 0"),
        (["tune", "--out", "/no/such/folder/policy"], "--out"),
        (["tune", "--repeat", "0"], "--repeat 0"),
        (["tune", "--sizes", "6"], "size 6"),
        (["bench", "plans", "-n", "2,x"], "-n 2,x"),
        (["bench", "plans", "-n", "17"], "-n 17"),
        (["bench", "plans", "--seconds", "inf"], "--seconds"),
    ],
)
def test_what_is_refused(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pgasdl.tools.cli.main(arguments) == pgasdl.tools.cli.USAGE_ERROR
    assert named in capsys.readouterr().err


def test_unlike_nodes_are_measured_by_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = "ABB"
    monkeypatch.setattr(Topology, "machines", lambda self, ranks: [hosts[r] for r in ranks])
    monkeypatch.setattr(Topology, "maps", lambda self, ranks: len({hosts[r] for r in ranks}) == 1)
    monkeypatch.setattr("pgasdl.tools.bench.calibrate.SIZES", (1024, 2048, 4096))

    def program(ctx: Context) -> tuple[Calibration, list[str]]:
        session = Session(ctx, Output(ctx.rank), rounds=1, seconds=0.001)
        found = calibrate(session)
        for kind in ("broadcast", "reduce", "average"):
            predicted = predict_all(ctx, found, choices_here(ctx, kind), 4096, kind)
        return found, [str(choice) for choice in predicted]

    (found, choices), *others = loopback.run(3, program)
    assert all(other == (found, choices) for other in others)
    assert found.across is not None
    assert (found.inside.ranks, found.across.ranks, found.per_node) == (2, 2, (1, 2))
    assert {"gdraa-nodes", "tree(group_size=1+2)"} <= set(choices)
