"""The build makes a stub of the native module, and no name for other modules."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

from support.requiring import require_programs

import pgasdl
from pgasdl import _native

# Where the module is: an editable package lies elsewhere.
STUB = Path(_native.__file__).with_name("_native.pyi")


def names(body: list[ast.stmt]) -> set[str]:
    """The names that statements define or declare."""
    found = {each.name for each in body if isinstance(each, ast.ClassDef | ast.FunctionDef)}
    for each in body:
        targets = each.targets if isinstance(each, ast.Assign) else ()
        targets = (each.target,) if isinstance(each, ast.AnnAssign) else targets
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def public(of: object) -> set[str]:
    return {name for name in vars(of) if not name.startswith("_")}


def test_types_are_shipped() -> None:
    assert (Path(pgasdl.__file__).parent / "py.typed").exists()
    tree = ast.parse(STUB.read_text())
    assert public(_native) <= names(tree.body)
    for each in tree.body:
        if isinstance(each, ast.ClassDef):
            assert public(getattr(_native, each.name)) <= names(each.body), each.name


def test_other_modules_find_no_name_in_it() -> None:
    """Its standard library, say, may be another one than theirs."""
    require_programs(nm="binutils")
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", _native.__file__], capture_output=True, check=True, text=True
    )
    assert [line.split()[-1] for line in listed.stdout.splitlines()] == ["PyInit__native"]


def test_the_native_core_has_no_examples() -> None:
    # Whoever writes an example there has to add a test that runs it.
    assert ">>> " not in STUB.read_text()
