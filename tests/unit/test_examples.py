"""Every example in a docstring runs, and prints what it shows."""

from __future__ import annotations

import doctest
import importlib
import re
import runpy
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import forking
from support.environment import environment
from support.forking import Zygote
from support.launcher import run, torchrun
from support.places import ROOT
from support.requiring import require_modules
from support.starting import succeeded
from tiers import gate

import pgasdl
from pgasdl.tools.cli import _COMMANDS

PACKAGE = Path(pgasdl.__file__).parent


def modules_with_examples() -> list[str]:
    """All with examples but the package itself, whose example is a program of two ranks."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if ">>> " in path.read_text():
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            found.append(".".join(parts).removesuffix(".__init__"))
    found.remove("pgasdl")
    return found


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of_a_module(name: str) -> None:
    if "torch" in name.split("."):
        pytest.importorskip("torch")
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted
    assert not result.failed


README = (ROOT / "README.md").read_text()
SHOWN = re.findall(r"```python\n# (.*?)\n(.*?)```", README, re.DOTALL)
# Named there, not shown.
NAMED = ["backend.py", "ddp_hook.py"]


def test_the_readme_shows_programs_of_apps_and_ends() -> None:
    assert len(SHOWN) == 2
    for line, program in SHOWN:
        path = ROOT / line.split()[-1]
        plain = re.sub(r"import argparse\n\n|argparse\..*\n", "", path.read_text())
        assert plain.endswith(f'"""\n\n{program}')
    assert all(f"](apps/{name})" in README for name in NAMED)
    assert len(README.splitlines()) <= 120
    for link in re.findall(r"\]\(([^)#:]+)", README):
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize(
    "line",
    [
        *(line for line, _ in SHOWN),
        *gate(f"torchrun --nproc-per-node=2 apps/{name}" for name in NAMED),
    ],
)
def test_the_programs_of_the_readme(line: str) -> None:
    """From the root of the clone, where they are shown to start."""
    launcher, rest = line.split(maxsplit=1)
    *options, name = rest.removeprefix("run ").split()
    if "torch" in (ROOT / name).read_text():
        pytest.importorskip("torch")
    if launcher == "torchrun":
        done = torchrun(*options, str(ROOT / name), timeout=200)
    else:
        done = run(*options, name, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr
    assert set(re.findall(r"rank (\d)", done.stdout)) == {"0", "1"}


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    forks = Zygote("numpy", "pgasdl.matrix", "pgasdl.loopback")
    yield forks
    forks.close()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("overlap", r"\[0\] an iteration: [\d.]+ ms one after the other, [\d.]+ ms overlapped"),
        ("pipeline", "item 19 has passed 3 stages"),
        ("halo", "rank 2: 0.000 of the heat"),
        ("publish", "rank 2: .* the last of version 50"),
        ("steal", "rank 2: .* tasks"),
        ("matrix", "remap moves 960000 bytes in 6 messages"),
        ("watched 20", "ended in iteration 19 of 20, stopped: False"),
    ],
)
def test_the_cookbook(zygote: Zygote, name: str, told: str) -> None:
    """Short programs that check their own results."""
    name, *arguments = name.split()
    path = ROOT / "apps/cookbook" / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 60
    assert re.search(told, forking.run(zygote, 3, path, *arguments, timeout=120))


PROGRAMS = [
    path.relative_to(ROOT / "apps").as_posix()
    for path in sorted(ROOT.glob("apps/[a-z]*.py")) + sorted(ROOT.glob("apps/cookbook/*.py"))
    if re.search(r"^(with|distributed\.|if __name__)", path.read_text(), re.MULTILINE)
]


@pytest.mark.full
def test_every_program_has_help() -> None:
    require_modules("torch", "PIL")
    assert len(PROGRAMS) == 20
    forks = Zygote("torch.nn.parallel", "pgasdl.torch", "pgasdl.matrix")
    try:
        for program in PROGRAMS:
            told = forking.run(forks, 1, ROOT / "apps" / program, "-h", timeout=60)
            assert told.startswith("[0] usage: "), program
    finally:
        forks.close()


def test_pages_name_programs_and_commands_that_exist() -> None:
    """Python is never typed into a page: it comes from a file that a test runs."""
    for folder in ("tutorials", "howto", "explanation"):
        for page in sorted((ROOT / ".github/docs" / folder).glob("*.rst")):
            text = page.read_text()
            assert "code-block:: python" not in text, page
            for path in re.findall(r"(?:apps|docker|tests|native|pgasdl)/[\w/.-]*\w", text):
                assert (ROOT / path).exists(), f"{page.name}: {path}"
            for command in re.findall(r"(?:^ +|``|\$ )pgasdl ([a-z]+)", text, re.MULTILINE):
                assert command in _COMMANDS, f"{page.name}: pgasdl {command}"


def test_the_pictures_are_what_their_script_draws() -> None:
    folder = ROOT / ".github/docs/pictures"
    drawn = runpy.run_path(str(folder / "drawings.py"))["all_pictures"]()
    pages = "".join(page.read_text() for page in folder.parent.rglob("*.rst"))
    for name, text in drawn.items():
        assert (folder / name).read_text() == text, f"python {folder}/drawings.py"
        assert "prefers-color-scheme" in text and len(text) < 60_000
        assert "text{font:13px" in text, "12 pixels or more on a phone"
        assert ElementTree.fromstring(text).attrib["viewBox"].startswith("0 0 400 ")
        assert f"pictures/{name}\n   :width: 480px\n   :alt: " in pages


def test_the_example_of_the_package_is_a_program(tmp_path: Path) -> None:
    examples = doctest.DocTestParser().get_examples(pgasdl.__doc__ or "")
    assert examples
    program = tmp_path / "program.py"
    program.write_text("".join(example.source for example in examples))
    done = run("-n", "2", str(program))
    assert done.returncode == 0, done.stdout + done.stderr


def test_help_of_the_pictures_makes_no_folder(tmp_path: Path) -> None:
    require_modules("PIL")
    line = [sys.executable, str(ROOT / "apps/pictures.py"), "--help"]
    assert "FOLDER" in succeeded(line, env=environment(), timeout=60, cwd=tmp_path)
    assert not list(tmp_path.iterdir())
