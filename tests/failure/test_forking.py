"""Forked ranks that a test does not expect to fail do so in every way: it ends, and says how."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import forking, starting
from support.forking import HungError, Zygote
from support.leftovers import gone

FAULTS = {
    "raise ValueError('broken')": (AssertionError, "rank 1, process .*ended with 1(.|\n)*broken"),
    "os.kill(os.getpid(), 9)": (AssertionError, "rank 1, process .*ended with -9"),
    "os._exit(3)": (AssertionError, "rank 1, process .*ended with 3"),
    "time.sleep(1000)": (HungError, "ends of ranks(.|\n)*rank 1, process .*runs"),
    "while True: print('again')": (HungError, "rank 1 prints without end(.|\n)*again"),
    "sys.stdout.write('x' * 100_000); os._exit(4)": (AssertionError, "ended with 4"),
}
PROGRAM = """
import os, sys, time
print("process", os.getpid(), flush=True)
if os.environ["PGASDL_RANK"] == "1":
    {}
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_fails(zygote: Zygote, tmp_path: Path, fault: str) -> None:
    error, says = FAULTS[fault]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(fault))
    seconds = 1 if "sleep" in fault else 100
    with pytest.raises(error, match=says) as raised:
        forking.run(zygote, 2, program, timeout=seconds)
    words = str(raised.value).split()
    pids = [int(words[at + 1].strip(",")) for at, word in enumerate(words) if word == "process"]
    assert pids and gone(pids)
    (tmp_path / "sound.py").write_text("print('sound')")
    assert forking.run(zygote, 1, tmp_path / "sound.py", timeout=100) == "[0] sound\n"


def test_a_late_command_is_ended_with_what_it_started_in_groups_of_their_own(
    tmp_path: Path,
) -> None:
    """As torchrun starts its ranks."""
    pid = tmp_path / "pid"
    program = (
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(1000)"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        starting.finished([sys.executable, "-c", program], env=dict(os.environ), timeout=2)
    assert gone([int(pid.read_text())])
