"""Which tests run: ``pytest`` runs the quick ones, ``pytest --full`` all.

Tests marked `full` cover more cases: further rows, sizes and mutants, long runs, guests. Tests
marked `gate` need something to be built, or are a sample of further rows: ``pytest -m gate`` runs
those that are not marked `full`, too, as ``.ci/run`` does. All but those marked `full` execute
every module of the package (``.ci/full modules`` checks it).

Folders run in several processes, each of which takes whole files; files that are named, in one.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from support import patience

# No test judges speed. Where what is tested must not depend on chance: --hypothesis-profile=gate
settings.register_profile("pgasdl", deadline=None)
settings.register_profile("gate", deadline=None, derandomize=True)
settings.load_profile("pgasdl")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the tests marked `full`, too")
    parser.addoption("--minutes", type=float, default=0.4, help="of each long run")
    parser.addoption(
        "--ranks-of-a-host", type=int, default=2, help="in the long run over verbs, on two hosts"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One process more than cores, up to four: tests wait, too, and start ranks."""
    named = [Path(each.partition("::")[0]) for each in config.args]
    if all(path.suffix == ".py" for path in named):
        return 0
    return min(len(os.sched_getaffinity(0)) + 1, 4)


def pytest_collection_finish() -> None:
    """Let the garbage collector leave out what modules and thousands of tests hold."""
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["taken"] = patience.taken()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over the times that a process of tests has kept; one that died has none."""
    patience.keep(getattr(node, "workeroutput", {}).get("taken", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The operations that had to be fast, and how fast they were."""
    for line in patience.summary():
        terminalreporter.write_line(line)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    left_out_by = ("full",) if config.option.markexpr == "gate" else ("full", "gate")
    kept, left_out = [], []
    for item in items:
        marked = any(item.get_closest_marker(name) for name in left_out_by)
        (left_out if marked else kept).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept
