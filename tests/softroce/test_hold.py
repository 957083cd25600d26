"""A guest that is held between the two stores of a word: a flag that is written is raised twice."""

from __future__ import annotations

import re
from pathlib import Path

import kernel
import pytest
import rig

pytestmark = pytest.mark.full

WORD = Path(__file__).with_name("word.py")


def test_a_flag_by_a_write_is_raised_twice() -> None:
    result = rig.run(["/usr/bin/python3", str(WORD), "20"], hold=2000).check()
    told = re.fullmatch(r"raised 20 times, and (\d+) times again\n", result.output)
    assert told is not None, result.output
    assert int(told[1]) > 0
    held = re.search(r"^hold: held (\d+) words, ", result.console, re.MULTILINE)
    assert held is not None, result.last_words()
    assert int(held[1]) >= 20


def test_a_kernel_with_other_stores_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "path", lambda: Path("/bin/true"))
    result = rig.run("true", hold=1)
    assert result.status == rig.VANISHED
    assert "this kernel does not store words as memcpy_orig does" in result.last_words()
