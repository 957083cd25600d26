"""Input from outside: every committed input again, and some new ones; see README.md."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_building import build, missing_tools, run
from fuzz_drive import TARGETS, target

HERE = Path(__file__).parent

NATIVE = ("endpoint", "gossip", "mpi", "shm", "tcp", "verbs")
CORPUS = HERE / "corpus"
LONGEST = 512
IN_CI = os.environ.get("CI") == "true"
# Executions without guidance by coverage, and with it: each number takes a few seconds.
N_BLIND = {"store": 50}
N_GUIDED = {"store": 1_000, "gossip": 200_000}
OPTIONS = (f"-max_len={LONGEST}", "-seed=1", "-timeout=20", "-rss_limit_mb=2048", "-verbosity=0")


def inputs(name: str) -> list[bytes]:
    """The committed ones, in a fixed order."""
    found = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    assert found
    return found


def mutated(chance: random.Random, seeds: list[bytes]) -> bytes:
    """A seed with pieces changed, dropped or added, also from another seed."""
    data = bytearray(chance.choice(seeds))
    for _ in range(chance.randint(1, 8)):
        at = chance.randint(0, len(data))
        match chance.randrange(4):
            case 0:
                data[at : at + 1] = bytes([chance.choice((0, 1, 127, 255, chance.randrange(256)))])
            case 1:
                del data[at : at + chance.randint(1, 8)]
            case 2:
                data[at:at] = chance.randbytes(chance.randint(1, 8))
            case _:
                other = chance.choice(seeds)
                begin = chance.randint(0, len(other))
                data[at:at] = other[begin : begin + 32]
    return bytes(data[:LONGEST])


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_of_python(name: str) -> None:
    one = target(name)
    for data in inputs(name):
        one(data)


@pytest.mark.parametrize("name", TARGETS)
def test_mutations_of_the_corpus(name: str) -> None:
    one, seeds = target(name), inputs(name)
    chance = random.Random(1)
    for _ in range(N_BLIND.get(name, 500)):
        data = mutated(chance, seeds)
        try:
            one(data)
        except BaseException:
            print(f"the input is {data!r}")
            raise


def lacks(what: list[str]) -> None:
    """Skip if something is missing on a user's machine; in CI fail."""
    if what:
        (pytest.fail if IN_CI else pytest.skip)(f"needs {', '.join(what)}")


@pytest.fixture(scope="module")
def native() -> tuple[Path, bool]:
    """The folder of the programs, and whether libFuzzer drives them."""
    guided = not missing_tools("clang++") or IN_CI
    compiler = "clang++" if guided else "g++"
    lacks(missing_tools(compiler))
    return build(compiler), guided


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NATIVE)
def test_native(name: str, native: tuple[Path, bool], tmp_path: Path) -> None:
    folder, with_libfuzzer = native
    program = str(folder / f"fuzz_{name}")
    if with_libfuzzer:
        guided([program], name, tmp_path)
    else:
        assert f"{len(inputs(name))} inputs" in run(program, str(CORPUS / name))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TARGETS)
def test_python(name: str, tmp_path: Path) -> None:
    lacks([] if importlib.util.find_spec("atheris") else ["atheris (pip install atheris)"])
    guided([sys.executable, str(HERE / "fuzz_drive.py"), name], name, tmp_path)


def guided(command: list[str], name: str, folder: Path) -> None:
    """A fixed number of executions from the committed corpus; an input that fails is printed."""
    (folder / "corpus").mkdir()
    n_runs = N_GUIDED.get(name, 10_000)
    places = [f"-artifact_prefix={folder}/", str(folder / "corpus"), str(CORPUS / name)]
    done = subprocess.run(
        [*command, f"-runs={n_runs}", *OPTIONS, *places],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        check=False, timeout=800,
    )  # fmt: skip
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert done.returncode == 0 and not found, f"{found}\n{done.stdout[-6000:]}"
