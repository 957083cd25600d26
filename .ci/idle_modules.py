"""``coverage json -o - | python .ci/idle_modules.py``: names modules that no test executed.

Importing a module is not enough: one of its functions must have been called.
"""

from __future__ import annotations

import json
import sys

# Runs before a rank, in an interpreter that has no packages (-I -S); without it no rank starts.
EXEMPT = ("pgasdl/runtime/launch/shim.py",)

files = json.load(sys.stdin)["files"]
idle = []
for path, file in sorted(files.items()):
    functions = [part["executed_lines"] for name, part in file["functions"].items() if name]
    if functions and not any(functions) and not path.endswith(EXEMPT):
        idle.append(path)
print(f"{len(files) - len(idle)} of {len(files)} modules executed")
sys.exit(f"not executed: {', '.join(idle)}" if idle or not files else 0)
