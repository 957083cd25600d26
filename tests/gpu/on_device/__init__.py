"""The parts of ``tests/gpu/on_device.py``, each a module with ``run(tell, smoke)``."""

import sys
from pathlib import Path

# Arrays and streams by the driver alone, and programs that also run on the fake driver.
PROGRAMS = Path(__file__).parents[1] / "programs"
sys.path.append(str(PROGRAMS))
