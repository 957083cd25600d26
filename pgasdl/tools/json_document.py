"""The option ``--json`` of every command that prints a table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

STDOUT = "-"


def takes_stdout(file: str | None) -> bool:
    """Whether standard output is for the document alone."""
    return file == STDOUT


def write_json(document: Any, file: str | None) -> None:
    """Write one document to a file or to standard output; None: do not write it."""
    if file is None:
        return
    text = json.dumps(document, indent=2) + "\n"
    if takes_stdout(file):
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        Path(file).write_text(text, encoding="utf-8")
