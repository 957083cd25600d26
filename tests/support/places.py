"""Where things lie: the package under test, and what belongs to the checkout."""

from __future__ import annotations

from pathlib import Path

import pgasdl.config

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
APPS = ROOT / "apps"
# The folder of the pgasdl under test: the checkout's has no compiled part once it is installed.
INSTALLED = Path(pgasdl.config.__file__).parents[1]
