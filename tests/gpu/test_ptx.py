"""The committed PTX: made from the kernels as they are, and with nothing that may change bits."""

from __future__ import annotations

import re
import sys

import ptx
import pytest
from support.environment import environment
from support.starting import succeeded

pytestmark = pytest.mark.gate  # the fake driver is built first


def test_ptx_is_that_of_the_kernels() -> None:
    try:
        ptx.find_library()
    except ptx.MissingCompilerError as missing:
        pytest.skip(str(missing))
    # In a separate process: NVRTC leaves a locale behind in which our output cannot be decoded.
    compiled = succeeded([sys.executable, ptx.__file__, "show"], env=environment(), timeout=200)
    if compiled != ptx.read():
        pytest.fail("device_kernels.cu or its headers have changed: python tests/gpu/ptx.py")


def test_ptx_rounds_as_the_processor_does() -> None:
    text = ptx.read()
    arithmetic = set(re.findall(r"\b(?:add|sub|mul|fma|mad|min|max|cvt)\.\S*f(?:16|32|64)\b", text))
    assert arithmetic == {
        "add.rn.f32",
        "add.rn.f64",
        "mul.rn.f32",
        "mul.rn.f64",
        "cvt.f32.f16",
        "cvt.f64.f32",
        "cvt.rn.f16.f32",
        "cvt.rn.f32.f64",
    }
    assert ".ftz" not in text and ".sat" not in text


def test_ptx_keeps_to_registers() -> None:
    # A parameter whose address is taken, or an array with an index unknown at compile time, lands
    # in local memory, which is many times slower.
    assert not re.search(r"\.local|\bld\.(?!global|param)|\bst\.(?!global)", ptx.read())


def test_ptx_is_modest() -> None:
    # The driver compiles all of it at first use: about a second.
    assert len(ptx.read()) < 350_000
