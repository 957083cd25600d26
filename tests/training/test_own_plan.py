"""The example of a plan from outside the package: as a user starts it, in an exchange, tuned,
simulated, and chosen by a policy in a program that does not know of it."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import jobs
import numpy as np
import pytest
from support.environment import environment
from support.launcher import PGASDL
from support.places import APPS
from support.starting import succeeded

import pgasdl.tools.cli
from pgasdl import ConfigError, Context, GradientExchange, PlanError, loopback
from pgasdl.collectives.policy import Policy
from pgasdl.plans import PLANS, plugins

PROGRAM = APPS / "own_plan.py"
TRAINING = """
import os, sys
import numpy as np
import pgasdl
if len(sys.argv) > 1 and os.environ["PGASDL_RANK"] == sys.argv[1]:
    import own_plan
try:
    with pgasdl.init(log="warning") as ctx:
        exchange = pgasdl.GradientExchange(ctx, [((100,), np.float32), ((5000,), np.float32)])
        for turn in range(3):
            for layer in (0, 1):
                exchange.gradient(layer)[...] = ctx.rank + turn
                exchange.ready(layer)
            for layer in (0, 1):
                exchange.wait(layer)
                assert (exchange.gradient(layer) == turn + 1).all()
        handle = ctx.allreduce_handle(np.ones(10, np.float32))
        print(exchange.plan, handle.plan, flush=True)
except (pgasdl.ConfigError, pgasdl.MismatchError) as error:
    print("refused:", error, flush=True)
"""


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Remove the plans and modules that a test brought into this process."""
    yield
    for name in plugins.names():
        del PLANS[name]
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == str(PROGRAM):
            del sys.modules[name]


def command(*arguments: str, folder: Path, **more: str) -> str:
    """Run ``pgasdl`` in a folder; return its standard output."""
    env = environment(*jobs.FOLDERS, **more)
    return succeeded([*PGASDL, *arguments], env=env, timeout=120, cwd=folder)


def test_it_runs_in_under_60_lines() -> None:
    assert len(PROGRAM.read_text(encoding="utf-8").splitlines()) < 60
    out = jobs.run(3, PROGRAM)
    said = "right for 1 to 8 ranks; with one phase: race"
    ends = [
        f"rank {rank} of 3: <Collective average of float32 x 1000, plan flat>" for rank in range(3)
    ]
    simulated = [line for line in out.splitlines() if "simulated" in line]
    assert [line.split()[-3] for line in simulated] == ["flat", "gdraa"]
    assert sorted(set(out.splitlines()) - set(simulated)) == sorted(
        [f"[0] {said}", *(f"[{rank}] {end}" for rank, end in enumerate(ends))]
    )
    assert said in jobs.run(0, PROGRAM)


def test_everything_takes_it_like_any_other() -> None:
    runpy.run_path(str(PROGRAM))

    def program(ctx: Context) -> None:
        exchange = GradientExchange(ctx, [((5,), np.float32), ((3, 3), np.float64)], plan="flat")
        for turn in range(4):
            for layer in (1, 0):
                exchange.gradient(layer)[...] = ctx.rank * turn
                exchange.ready(layer)
            for layer in (0, 1):
                exchange.wait(layer)
                assert (exchange.gradient(layer) == turn).all()
        with pytest.raises(PlanError, match="allreduce_handle"):
            ctx.allreduce(np.ones(3, np.float32), op="mean", plan="flat")

    loopback.run(3, program)
    loopback.run(3, program, seed=3, delay=2, reorder=True, late_source=True, mapped=False)


@pytest.mark.full
def test_it_is_tuned_and_its_policy_runs(tmp_path: Path) -> None:
    """Measured among the candidates; a policy that names it is honoured in training."""
    fast = ("--repeat", "1", "--seconds", "0.001", "--sizes", "64,4K")
    file = tmp_path / "policy"
    said = command(
        "tune", "-n", "3", *fast, "--plan-modules", str(PROGRAM), "--out", str(file),
        folder=tmp_path,
    )  # fmt: skip
    assert re.search(r"\b64 bytes: .*\bflat \d+\.\d \(\d+\.\d\)", said), said
    assert f"PGASDL_PLAN_MODULES={PROGRAM}" in said
    assert f"# plans of {PROGRAM}" in file.read_text()

    # Which plan is the fastest depends on the machine; this is what the file may have said.
    remarks = [line for line in file.read_text().splitlines() if line.startswith("#")]
    file.write_text("\n".join([*remarks, "allreduce:0-4k:flat#4k-inf:tree"]) + "\n")
    program = tmp_path / "train.py"
    program.write_text(TRAINING)
    settings = {"PGASDL_POLICY": f"@{file}", "PGASDL_PLAN_MODULES": "own_plan"}
    out = command("run", "-n", "3", str(program), folder=tmp_path, **settings)
    assert sorted(out.splitlines()) == [f"[{r}] flat x1, tree x1 flat" for r in range(3)]
    # A rank whose program has already imported the module registers the plan once; so does the
    # plan's own program.
    out = command("run", "-n", "3", str(program), "1", folder=tmp_path, **settings)
    assert sorted(out.splitlines()) == [f"[{r}] flat x1, tree x1 flat" for r in range(3)]
    settings["PGASDL_PLAN_MODULES"] = str(PROGRAM)
    assert "plan flat>" in command("run", "-n", "2", str(PROGRAM), folder=tmp_path, **settings)
    del settings["PGASDL_PLAN_MODULES"]
    out = command("run", "-n", "3", str(program), folder=tmp_path, **settings)
    assert out.count("no plan named 'flat'") == 3 and "PGASDL_PLAN_MODULES" in out


def test_ranks_with_different_plans_are_told(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(TRAINING)
    out = command("run", "-n", "3", str(program), "1", folder=tmp_path)
    assert len(re.findall(r'refused: rank \d has registered the plans ".*PGASDL', out)) == 3, out


@pytest.mark.full
def test_bench_plans_and_sim_have_it(tmp_path: Path) -> None:
    fast = ("--repeat", "1", "--seconds", "0.001", "--sizes", "64", "--plan-modules", "own_plan")
    command("bench", "plans", "-n", "2", *fast, folder=tmp_path)
    rows = json.loads((tmp_path / "pgasdl-plans" / "plans.json").read_text())
    assert "flat" in {row["plan"] for row in rows}
    simulate = ("sim", "-n", "8", "--size", "4K", "--plans", "flat,gdraa")
    for out in (
        command(*simulate, "--plan-modules", str(PROGRAM), folder=tmp_path),
        command(*simulate, folder=tmp_path, PGASDL_PLAN_MODULES="own_plan"),
    ):
        assert re.search(r"^flat .* 56 ", out, re.MULTILINE), out


def test_loopback_takes_it_once() -> None:
    """Ranks that are threads import the module together."""

    def program(ctx: Context) -> str:
        return ctx.allreduce_handle(np.ones(3, np.float32), op="mean").plan

    settings = {"plan_modules": str(PROGRAM), "policy": "allreduce:0-inf:flat"}
    assert loopback.run(4, program, **settings) == ["flat"] * 4
    assert loopback.run(4, program, **settings) == ["flat"] * 4
    assert Policy.parse("allreduce:0-inf:flat")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("from pgasdl.plans import PLANS, register; register(PLANS['tree'])", "PlanError: "),
        ("x = 1", "registers no plan"),
    ],
)
def test_modules_that_are_refused(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "refused_plans.py"
    file.write_text(text)
    for _ in range(2):  # the second time too
        with pytest.raises(ConfigError, match=f"plan module {file}") as caught:
            loopback.run(2, lambda ctx: None, plan_modules=str(file))
        assert told in str(caught.value)


def test_modules_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    for name, told in (("no/such.py", "no such file"), ("no_such_module", "PYTHONPATH")):
        for arguments in (["tune"], ["bench", "plans"], ["sim"]):
            line = [*arguments, "--plan-modules", f"json,{name}"]
            assert pgasdl.tools.cli.main(line) == pgasdl.tools.cli.USAGE_ERROR
            said = capsys.readouterr().err
            assert f"plan module {name}" in said and told in said
