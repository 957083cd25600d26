"""``coverage json -o - | python .ci/idle_modules.py``: names modules that no test executed.

Importing a module is not enough: one of its functions must have been called.
"""

from __future__ import annotations

import json
import sys
import sysconfig

# The first runs before a rank, in an interpreter that has no packages (-I -S); without it no rank
# starts. The second is for torchft, which only lane `frameworks` has.
EXEMPT = ("pgasdl/runtime/launch/shim.py", "pgasdl/torch/ft.py")

# Some tests start copies of the package.
INSTALLED = f"{sysconfig.get_path('purelib')}/pgasdl/"

report = json.load(sys.stdin)["files"]
files = {path: file for path, file in report.items() if path.startswith(INSTALLED)}
files = {path: file for path, file in files.items() if not path.endswith(EXEMPT)}
idle = []
for path, file in sorted(files.items()):
    functions = [part for name, part in file["functions"].items() if name]
    called = any(part["executed_lines"] for part in functions)
    if any(part["missing_lines"] for part in functions) and not called:
        idle.append(path)
print(f"{len(files) - len(idle)} of {len(files)} modules executed")
sys.exit(f"not executed: {', '.join(idle)}" if idle or not files else 0)
