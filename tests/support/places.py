"""Paths: the package under test, and the checkout's own files."""

from __future__ import annotations

from pathlib import Path

import pgasdl.config

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
APPS = ROOT / "apps"
# The folder that holds the installed pgasdl, which is tested: the checkout's has no compiled part.
INSTALLED = Path(pgasdl.config.__file__).parents[1]
