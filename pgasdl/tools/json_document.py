"""The document of ``--json``, an option of every command that prints a table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def write_json(document: Any, file: Path | None = None) -> None:
    """Write one document to a file, or to standard output."""
    text = json.dumps(document, indent=2) + "\n"
    if file is not None:
        file.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
        sys.stdout.flush()
