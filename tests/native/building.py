"""Builds the C++ tests, whole or with one file changed, and runs them.

``python tests/native/building.py LANE`` builds and runs one lane.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

# -O1: a sanitizer's instrumentation of optimised templates takes gcc minutes. No NDEBUG.
FLAGS = "-O1 -g"

# The sanitizers of each lane; the last lane builds for another processor and runs what an emulator
# can run.
LANES = {
    "plain": "",
    "thread": "thread",
    "address": "address,undefined",
    "aarch64": "",
}

# libibverbs' headers are the same for every processor; they come after that processor's own.
CROSS = {
    "aarch64": (
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++",
        "-DCMAKE_CXX_FLAGS=-idirafter /usr/include",
        "-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;/usr/aarch64-linux-gnu",
    )
}

# Tests that need system calls which an emulator lacks: process_vm_writev and seccomp.
NOT_EMULATED = {"aarch64": ("test_memory", "test_process")}

ENVIRONMENT = {
    "TSAN_OPTIONS": "halt_on_error=1 second_deadlock_stack=1 exitcode=66",
    "ASAN_OPTIONS": "detect_leaks=1 strict_string_checks=1 detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1 halt_on_error=1",
}


def tool(name: str) -> str | None:
    """Where a program lies: beside this interpreter, as pip installs it, or on the path."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def missing_tools() -> list[str]:
    """Tools that a build needs and this machine lacks."""
    return [name for name in ("cmake", "ctest", "ninja", "g++") if tool(name) is None]


def environment() -> dict[str, str]:
    """Sanitizers stop at the first report; PGASDL_ variables do not reach the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PGASDL_")}
    return {**kept, **ENVIRONMENT}


def run(*command: str, cwd: Path | None = None, timeout: float = 1800) -> str:
    """Run a command; return its output, or raise an error that shows it."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment(),
        timeout=timeout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout[-6000:]}")
    return done.stdout


@dataclass(frozen=True)
class Build:
    """One lane's build folder, kept between runs under ``build/``.

    Attributes
    ----------
    alone : files, relative to the project, that ``link_changed`` may replace; each is one
        translation unit
    """

    lane: str
    alone: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return ROOT / "build" / f"native-{self.lane}"

    @property
    def compiler_flags(self) -> list[str]:
        """The flags to compile a single file, the same as CMake's."""
        sanitize = LANES[self.lane]
        flags = ["-std=c++20", *FLAGS.split(), "-Wall", "-Wextra", "-Werror", "-pthread"]
        return flags + ([f"-fsanitize={sanitize}", "-fno-omit-frame-pointer"] if sanitize else [])

    def make(self, *targets: str) -> None:
        """Configure and build the targets, default everything, warnings as errors."""
        cmake, ninja = tool("cmake"), tool("ninja")
        assert cmake is not None and ninja is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "w") as lock:  # tests of several files run at once
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._make(cmake, ninja, *targets)

    def _make(self, cmake: str, ninja: str, *targets: str) -> None:
        run(
            cmake, "-S", str(ROOT / "native"), "-B", str(self.folder), "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            "-DPGASDL_PYTHON=OFF", "-DPGASDL_TESTS=ON", "-DPGASDL_WERROR=ON",
            f"-DPGASDL_SANITIZE={LANES[self.lane]}",
            "-DPGASDL_UNITY=ON", f"-DPGASDL_ALONE={';'.join(self.alone)}",
            "-DCMAKE_BUILD_TYPE=Checked", f"-DCMAKE_CXX_FLAGS_CHECKED={FLAGS}",
            *CROSS.get(self.lane, ()),
        )  # fmt: skip
        run(cmake, "--build", str(self.folder), *(("--target", *targets) if targets else ()))

    def test(self) -> str:
        """Run all tests of the lane; return the output, or raise if one failed or did not run."""
        ctest = tool("ctest")
        assert ctest is not None
        left_out = NOT_EMULATED.get(self.lane, ())
        output = run(
            ctest, "--test-dir", str(self.folder), "--output-on-failure", "--no-tests=error",
            *(("-E", f"^({'|'.join(left_out)})$") if left_out else ()),
        )  # fmt: skip
        expected = {path.stem for path in (ROOT / "tests" / "native").glob("test_*.cpp")}
        expected -= set(left_out)
        if self.lane == "thread":
            expected -= {"test_reduce", "test_device_kernels", "test_device_reduce"}
        absent = sorted(name for name in expected if f" {name} " not in output)
        if absent:
            raise RuntimeError(f"lane {self.lane} did not run {', '.join(absent)}")
        return output

    def archives(self) -> list[str]:
        """The layers' libraries, each before those that it uses."""
        layers = ("executor", "pgas", "transport", "memory", "reduce", "sys")
        return [str(self.folder / layer / f"libpgasdl_{layer}.a") for layer in layers]

    def link_changed(self, test: str, file: Path, text: str, folder: Path) -> Path:
        """Link ``test`` with ``text`` as the content of ``file`` (relative to the project).

        A changed file of a layer is compiled and linked before the libraries, so that their version
        is left out; a changed header of the tests lies beside a copy of the test.
        """
        include = ["-I", str(ROOT / "native")]
        compiler = tool("g++")
        assert compiler is not None
        objects = []
        if file.parts[0] == "tests":
            shutil.copytree(ROOT / "tests" / "native", folder / "tests", dirs_exist_ok=True)
            (folder / "tests" / file.name).write_text(text)
            sources = [folder / "tests" / f"{test}.cpp"]
        else:
            changed = folder / file.name
            changed.write_text(text)
            sources = [changed]
            made = self.folder / "tests" / "CMakeFiles" / f"{test}.dir" / f"{test}.cpp.o"
            objects.append(str(made))
        for source in sources:
            target = folder / f"{source.stem}.o"
            run(compiler, *self.compiler_flags, *include, "-c", str(source), "-o", str(target))
            objects.append(str(target))
        program = folder / test
        run(compiler, *self.compiler_flags, *objects, *self.archives(), "-o", str(program))
        return program


def outcome(program: Path, timeout: float = 300) -> tuple[int, str]:
    """Exit status and output of a test program that may well fail."""
    done = subprocess.run(
        [str(program)],
        env=environment(),
        timeout=timeout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def main(lane: str) -> None:
    """Build and run a lane."""
    build = Build(lane)
    build.make()
    print(build.test())


if __name__ == "__main__":
    main(sys.argv[1])
