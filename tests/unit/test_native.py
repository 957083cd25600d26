"""The C++ tests under the thread sanitizer, and proof that they find seeded bugs.

The first build on a machine takes a minute or two; it is kept in ``build/native-thread``. The
lane ``native-address`` of ``.ci/full`` runs the same programs.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))
from building import ROOT, Build, missing_tools, outcome

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

RACE = "ThreadSanitizer: data race"
CHECK_FAILED = "CHECK("


@dataclass(frozen=True)
class Seeded:
    """One bug: in ``file``, ``sound`` becomes ``broken``; ``test`` must print ``report``."""

    name: str
    file: str
    sound: str
    broken: str
    test: str
    report: str


SEEDED = [
    Seeded(
        "flag-stored-relaxed",
        "native/transport/loopback/loopback.cpp",
        "raise_flag(*operation.flag, operation.value, operation.add);",
        "if (operation.add) raise_flag(*operation.flag, operation.value, true);\n"
        "else operation.flag->store(operation.value, std::memory_order_relaxed);",
        "test_onesided",
        RACE,
    ),
    Seeded(
        "count-added-relaxed",
        "native/transport/loopback/loopback.cpp",
        "raise_flag(*operation.flag, operation.value, operation.add);",
        "if (!operation.add) raise_flag(*operation.flag, operation.value, false);\n"
        "else operation.flag->fetch_add(operation.value, std::memory_order_relaxed);",
        "test_onesided",
        RACE,
    ),
    Seeded(
        "count-added-in-two-steps",
        "native/transport/loopback/loopback.cpp",
        "raise_flag(*operation.flag, operation.value, operation.add);",
        "const std::uint32_t old = operation.add ? operation.flag->load() : 0;\n"
        "if (operation.add) sched_yield();\n"
        "operation.flag->store(old + operation.value, std::memory_order_release);",
        "test_onesided",
        CHECK_FAILED,
    ),
    Seeded(
        "count-waits-relaxed",
        "native/pgas/operations.cpp",
        "word.compare_exchange_weak(there, there - wanted, std::memory_order_acq_rel,",
        "word.compare_exchange_weak(there, there - wanted, std::memory_order_relaxed,",
        "test_onesided",
        RACE,
    ),
    Seeded(
        "flag-not-held-for-completions",
        "native/transport/loopback/loopback.cpp",
        "connection.held.hold(std::move(operation), connection.posted);",
        "connection.held.hold(std::move(operation), 0);",
        "test_onesided",
        CHECK_FAILED,
    ),
    Seeded(
        "plan-waits-relaxed",
        "native/executor/bound_plan.cpp",
        "const std::uint32_t seen = step.word->load(std::memory_order_acquire);",
        "const std::uint32_t seen = step.word->load(std::memory_order_relaxed);",
        "test_plans",
        RACE,
    ),
    Seeded(
        "no-mark-before-a-flag",
        "native/pgas/operations.cpp",
        "set_marks(segment.local().board, segment.notifications(), flag.notification);",
        "",
        "test_onesided",
        CHECK_FAILED,
    ),
    Seeded(
        "nobody-looks-for-lost-marks",
        "native/pgas/board.cpp",
        "if (scan(board, begin, of_block, found)) set_marks(board, notifications, found);",
        "(void)scan(board, begin, of_block, found), (void)notifications;",
        "test_onesided",
        CHECK_FAILED,
    ),
    Seeded(
        "waitsome-relaxed",
        "native/pgas/operations.cpp",
        "board[begin].load(std::memory_order_acquire) != 0",
        "board[begin].load(std::memory_order_relaxed) != 0",
        "test_onesided",
        RACE,
    ),
    Seeded(
        "group-waits-relaxed",
        "native/pgas/group.cpp",
        "control_->local().board[id].load(std::memory_order_acquire);",
        "control_->local().board[id].load(std::memory_order_relaxed);",
        "test_groups",
        RACE,
    ),
    Seeded(
        "group-slots-do-not-alternate",
        "native/pgas/allgather.cpp",
        "(generation & 1) * ranks_.size() + distance;",
        "(generation & 0) * ranks_.size() + distance;",
        "test_relay",
        "",
    ),
    Seeded(
        "passed-on-before-it-came",
        "native/pgas/dissemination.cpp",
        "const std::size_t end = course.end_of_base(course.arrived);",
        "const std::size_t end = course.steps.size();",
        "test_relay",
        "",
    ),
    Seeded(
        "nobody-is-told-of-a-loss",
        "native/pgas/dissemination.cpp",
        "if (!course.relayed()) return;",
        "if (course.relayed()) return;",
        "test_relay",
        CHECK_FAILED,
    ),
    Seeded(
        "one-slot-too-few",
        "tests/native/plans.hpp",
        "const Rank number = sender < owner ? sender : sender - 1;",
        "const Rank number = (sender < owner ? sender : sender - 1) / 2;",
        "test_plans",
        "",
    ),
    Seeded(
        "no-wake-up-after-the-flag",
        "native/transport/loopback/loopback.cpp",
        "if (wake_word != nullptr) wake_word->wake();",
        "(void)wake_word;",
        "test_wake_word",
        CHECK_FAILED,
    ),
    Seeded(
        "wake-words-do-not-count",
        "native/sys/wake_word.cpp",
        "compare_exchange_weak(seen, seen + 1,",
        "compare_exchange_weak(seen, seen - 1,",
        "test_wake_word",
        CHECK_FAILED,
    ),
    Seeded(
        "reset-in-two-steps",
        "native/pgas/operations.cpp",
        "value = word.exchange(0, std::memory_order_acq_rel);",
        "value = word.load(std::memory_order_acquire);\n"
        "  std::this_thread::yield();\n"
        "  word.store(0, std::memory_order_release);",
        "test_onesided",
        CHECK_FAILED,
    ),
    Seeded(
        "late-source-dropped",
        "native/transport/loopback/loopback.cpp",
        "            owner_of(*transfer.local)});",
        "            nullptr});",
        "test_failure",
        "",
    ),
    Seeded(
        "named-after-it-was-told",
        "native/transport/mpi/window.cpp",
        """  give_name(window, segment);
          // Tells also that everybody's memory is zero by now, open, and can be named.
          std::vector<std::uint64_t> shifts(group.members.size());
          library_->check(library_->allgather(shift, shifts.data(), group.communicator),
                          "MPI_Allgather", -1);""",
        "std::vector<std::uint64_t> shifts(group.members.size());\n"
        "library_->allgather(shift, shifts.data(), group.communicator);\n"
        "give_name(window, segment);",
        "test_mpi",
        CHECK_FAILED,
    ),
]

REPLACED = {bug.file for bug in SEEDED if bug.file.startswith("native/")}


@pytest.fixture(scope="module")
def build() -> Build:
    missing = missing_tools()
    if missing:
        pytest.skip(f"building the C++ tests needs {', '.join(missing)}")
    made = Build("thread", alone=tuple(sorted(REPLACED)))
    made.make()
    return made


def test_ranks_as_threads_have_no_races(build: Build) -> None:
    output = build.test()
    assert "100% tests passed" in output


@pytest.mark.parametrize("bug", SEEDED, ids=lambda bug: bug.name)
def test_a_seeded_bug_is_found(bug: Seeded, build: Build, tmp_path: Path) -> None:
    text = (ROOT / bug.file).read_text()
    # A bug that no longer applies proves nothing: adapt it to the code. Line breaks do not count.
    sound = r"\s+".join(re.escape(word) for word in bug.sound.split())
    found = len(re.findall(sound, text))
    assert found == 1, f"{bug.file} has {found} of: {bug.sound}"
    broken = re.sub(sound, lambda _: bug.broken, text)
    program = build.link_changed(bug.test, Path(bug.file), broken, tmp_path)
    status, output = outcome(program)
    assert status != 0, f"{bug.test} did not notice {bug.name}:\n{output[-2000:]}"
    assert bug.report in output, output[-4000:]
    if not bug.report:
        assert RACE in output or CHECK_FAILED in output or "DEADLYSIGNAL" in output, output[-4000:]


def test_the_same_link_without_a_bug_passes(build: Build, tmp_path: Path) -> None:
    # If this failed, every seeded bug above would seem to be found.
    for file, test in (
        ("native/pgas/group.cpp", "test_groups"),
        ("tests/native/plans.hpp", "test_executions"),
    ):
        program = build.link_changed(test, Path(file), (ROOT / file).read_text(), tmp_path)
        status, output = outcome(program)
        assert status == 0, output[-4000:]
