"""``.ci/run``, in its clone: the README's commands, and a sample of what pytest leaves out."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ci
import lanes

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("ccache", "chromium", "g++", "libibverbs-dev", "python3-dev", "python3-venv")


class Gate:
    """The steps' outcomes, by name; a step that fails at once ends the gate."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.tree = ci.tree(ROOT)
        self.seed = int(self.tree[:7], 16)
        self.env = ci.variables(ROOT, ci.new_environment(work / "environment"))
        self.outcomes: dict[str, ci.Outcome] = {}
        self.began = time.monotonic()

    def step(self, name: str, run: Callable[[], ci.Outcome], needed: bool = False) -> None:
        print(f"\n===== {name}", flush=True)
        began = time.monotonic()
        outcome = self.outcomes[name] = run()
        outcome.seconds = time.monotonic() - began
        print(f"----- {name}: {outcome.result} after {outcome.seconds:.0f} s", flush=True)
        if needed and outcome.failed:
            sys.exit(self.end())

    def command(self, name: str, line: str, timeout: float, needed: bool = False) -> None:
        self.step(name, lambda: ci.command(line, ROOT, self.env, timeout), needed)

    def tests(self, name: str, line: str, timeout: float) -> None:
        report = self.work / f"{name}.xml"
        self.step(name, lambda: ci.tests(line, ROOT, self.env, report, self.seed, timeout))

    def second_look(self) -> ci.Outcome:
        """At failed tests of all steps together."""
        looked = ci.Outcome(passed=1)
        for outcome in self.outcomes.values():
            looked.failures += outcome.failures
            outcome.failures = []
        ci.second_look(looked, ROOT, self.env, self.work / "again.xml", self.seed)
        return looked

    def end(self) -> int:
        """Print the closing table, and add it to the results; the status of the gate."""
        seconds = time.monotonic() - self.began
        print("\n" + lanes.status())
        print(f"{'step':<16} {'result':<8} {'seconds':>7} {'tests':>6}")
        for name, outcome in self.outcomes.items():
            print(f"{name:<16} {outcome.result:<8} {outcome.seconds:7.0f} {outcome.passed:6}")
            for why, number in sorted(outcome.skipped.items()):
                print(f"  skipped {number}: {why.splitlines()[0][:120]}")
        failed = [line for outcome in self.outcomes.values() for line in outcome.failed]
        flaky = [line for outcome in self.outcomes.values() for line in outcome.flaky]
        print("".join(f"FLAKY {line}\n" for line in flaky), end="")
        print("".join(f"FAILED {line}\n" for line in failed), end="")
        ci.add_result(
            lane="gate",
            commit=ci.git(ROOT, "rev-parse", "--short", "HEAD").strip(),
            hash=self.tree,
            result="failed" if failed else "flaky" if flaky else "passed",
            seconds=round(seconds),
            failed=failed,
            flaky=flaky,
            seed=self.seed,
        )
        passed = sum(outcome.passed for outcome in self.outcomes.values())
        print(f"gate: {seconds:.0f} s, tree {self.tree[:12]}, seed {self.seed}")
        print(f"{passed} passed, {len(failed)} failed", flush=True)
        return 1 if failed else 0


def readme_commands() -> list[str]:
    """The two commands of the README, as they stand there."""
    text = (ROOT / "README.md").read_text()
    block = re.search(r"```sh\n(.*?)```", text, re.DOTALL)
    assert block is not None
    main_job, tests = block[1].splitlines()
    return [main_job, tests]


def main(work: Path) -> int:
    with ci.alone():
        ci.install_packages(*PACKAGES)
        gate = Gate(work)
        main_job, tests = readme_commands()
        gate.command("main job", main_job, 900, needed=True)
        typed, browser, docs = (
            " ".join(ci.extras(ROOT, *names))
            for names in (("mpi", "jobs"), ("browser",), ("docs",))
        )
        lint = f"pip install --quiet {typed} && LINTERS={ci.linters(ROOT)}/bin .ci/lint"
        gate.command("lint", lint, 300, needed=True)  # mypy looks into mpi4py and starlette
        gate.tests("tests", tests, 1500)
        gate.command("native", "python tests/native/building.py plain", 900)
        gate.tests("sample", f"pip install --quiet {browser} && pytest -m gate", 900)
        gate.command("docs", f"pip install --quiet {docs} && .ci/docs", 300)
        gate.step("second look", gate.second_look)
        return gate.end()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
