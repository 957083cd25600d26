"""The loader of the CUDA driver, in front of sound, absent, old and failing ones; the fake one."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support import fake_driver
from support.environment import environment
from support.places import ROOT
from support.starting import finished

pytestmark = pytest.mark.gate  # the fake driver is built first

Fake = Callable[..., dict[str, str]]

TABLE = ROOT / "native" / "sys" / "cuda.hpp"
# A driver that has the entries of the tables that are given, and does nothing.
THIN = """
#include "sys/cuda.hpp"
namespace thin {
using namespace pgasdl::cuda;
#define DEFINE(member, name, parameters)  \\
  __attribute__((visibility("default"))) Result member parameters __asm__(name); \\
  Result member parameters { return 0; }
TABLES
}
"""


def part(name: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """How a part of the test program ended."""
    program = fake_driver.built().folder / "tests" / "test_cuda"
    return finished([str(program), name], env=env, timeout=60)


def told(name: str, env: dict[str, str]) -> str:
    done = part(name, env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def driver(folder: Path, tables: str) -> dict[str, str]:
    """The environment in which the only driver is a thin one."""
    library = folder / "libcuda.so.1"
    subprocess.run(
        ["g++", "-std=c++20", "-shared", "-fPIC", "-I", str(ROOT / "native"), "-x", "c++", "-",
         "-o", str(library)],
        input=THIN.replace("TABLES", tables), text=True, check=True,
    )  # fmt: skip
    return environment(LD_LIBRARY_PATH=str(folder))


def test_everything_holds_in_front_of_a_sound_driver(fake: Fake) -> None:
    told("all", fake())


@pytest.mark.parametrize("seed", range(3))
def test_everything_holds_with_longer_delays(fake: Fake, seed: int) -> None:
    told("all", fake(delay_us=1000, seed=seed))


def test_without_a_driver_there_is_a_reason(tmp_path: Path) -> None:
    fake_driver.built()
    text = told("loads_twice", environment(LD_LIBRARY_PATH=str(tmp_path)))
    assert text.count("missing: no CUDA driver here: libcuda.so.1: ") == 2
    assert "install NVIDIA's driver" in text


def test_a_driver_without_an_entry_is_too_old(tmp_path: Path) -> None:
    fake_driver.built()
    text = told("loads", driver(tmp_path, 'DEFINE(init, "cuInit", (unsigned flags))'))
    assert "libcuda.so.1 has no cuDriverGetVersion: too old?" in text
    assert "CUDA 11.7 or a later one" in text


def test_optional_entries_may_be_missing(tmp_path: Path) -> None:
    # This driver reports zero devices: it leaves the number as it was.
    fake_driver.built()
    text = told("loads", driver(tmp_path, "PGASDL_CUDA_FUNCTIONS(DEFINE)"))
    assert "no CUDA device here" in text


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_ERROR_NO_DEVICE"),
        ({"FAKE_FAIL": "init:1:803"}, "reload it or restart the machine"),
        ({"FAKE_FAIL": "cuInit:1:999"}, "is the kernel module nvidia_uvm loaded"),
        ({"FAKE_FAIL": "init:1:34"}, "look into LD_LIBRARY_PATH"),
        ({"FAKE_FAIL": "device_get_count:1"}, "cuDeviceGetCount: CUDA_ERROR_UNKNOWN"),
    ],
)
def test_a_driver_that_fails_says_why(fake: Fake, variables: dict[str, str], words: str) -> None:
    text = told("loads", fake() | variables)
    assert text.startswith("missing: no CUDA device here: ") and words in text


def test_a_failed_attempt_is_repeated(fake: Fake) -> None:
    first, second = told("loads_twice", fake(fail="init:1:999")).splitlines()
    assert first.startswith("missing: ") and second == "2 device(s)"


def test_visible_devices_are_counted(fake: Fake) -> None:
    assert told("loads", fake(devices=4)).startswith("4 ")
    assert told("loads", fake(devices=4) | {"CUDA_VISIBLE_DEVICES": "3,1"}).startswith("2 ")


@pytest.mark.parametrize("entry", ["mem_create", "cuMemMap", "mem_set_access"])
def test_the_call_that_is_named_fails(fake: Fake, entry: str) -> None:
    done = part("creates", fake(fail=f"{entry}:1:2"))
    assert done.returncode == 1 and "CUDA_ERROR_OUT_OF_MEMORY" in done.stderr
    assert told("creates", fake(fail=f"{entry}:2:2")) == "created\n"


def test_any_call_fails_by_its_number(fake: Fake) -> None:
    outcomes = [part("creates", fake(fail=f"any:{n}")).returncode for n in range(1, 30)]
    assert outcomes[0] != 0 and outcomes[-1] == 0
    assert outcomes == sorted(outcomes, key=lambda code: code == 0), outcomes


def test_host_memory_may_have_other_addresses_on_devices(fake: Fake) -> None:
    told("all", fake(lacks="host-pointer"))


def test_what_is_lacking_is_not_supported(fake: Fake) -> None:
    features = [line.split()[0] for line in told("tries", fake()).splitlines()]
    for lacking in features:
        lines = told("tries", fake(lacks=f"unified-addressing,{lacking}")).splitlines()
        results = {name: int(result) for name, result in map(str.split, lines)}
        # A stream cannot reach words in host memory that cannot be registered.
        also = {"stream-values", "wait-value-nor"} if lacking == "host-register" else set()
        also |= {"wait-value-nor"} if lacking == "stream-values" else set()
        assert {name for name, result in results.items() if result} == {lacking} | also
        assert results[lacking] == 801


@pytest.mark.parametrize("feature", ["vmm", "posix-handles"])
def test_memory_that_cannot_be_made_is_not_supported(fake: Fake, feature: str) -> None:
    done = part("creates", fake(lacks=f"dmabuf,{feature}"))
    assert done.returncode == 1 and "CUDA_ERROR_NOT_SUPPORTED" in done.stderr


def test_a_host_that_touches_device_memory_dies(fake: Fake) -> None:
    done = part("host_touches", fake())
    assert done.returncode == -signal.SIGSEGV and done.stderr == "touching\n"


def test_a_kernel_that_touches_other_memory_ends_its_context(fake: Fake) -> None:
    assert told("kernel_touches", fake()) == "refused\n"


def test_a_missing_wait_shows(fake: Fake) -> None:
    text = told("forgets_to_wait", fake(delay_us=1000))
    assert text == "too early: some without, 0 with\n"


def test_cuda_does_not_outlive_a_fork(fake: Fake) -> None:
    loaded, itself = told("forks", fake()).splitlines()
    assert loaded.startswith("missing: a parent of this process used CUDA")
    assert "start processes by spawn" in loaded
    assert itself == "the driver itself: 3"


def test_processes_share_allocations(fake: Fake) -> None:
    assert told("shares", fake()) == "3 after the other added 3\n"


def test_calls_at_the_end_of_the_process_are_refused(fake: Fake) -> None:
    assert told("ends", fake()) == "at the end: 4\n"


def test_the_table_has_each_entry_once() -> None:
    names = re.findall(r'"(cu[A-Z]\w+)"', TABLE.read_text())
    assert len(names) == len(set(names)) > 50
