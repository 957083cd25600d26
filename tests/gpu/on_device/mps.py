"""The same under MPS, which lets processes share the GPU at one time: all-reduce, training."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from on_device import allreduce, training
from on_device.findings import NotAvailable, Tell

DAEMON = "nvidia-cuda-mps-control"


def run(tell: Tell, smoke: bool) -> None:
    """The part."""
    with daemon() as env:
        allreduce.measure(tell.under("MPS: "), smoke, env=env, sizes=(1 << 16, 64 << 20))
        training.measure(tell.under("MPS: "), smoke, env)


@contextlib.contextmanager
def daemon() -> Iterator[dict[str, str]]:
    """The environment of processes that share the GPU by a daemon of ours."""
    if shutil.which(DAEMON) is None:
        raise NotAvailable(f"no {DAEMON} here")
    with tempfile.TemporaryDirectory(prefix="mps") as folder:
        env = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        # In the foreground, so that it ends with this part at the latest.
        process = subprocess.Popen(
            [DAEMON, "-f"], env=os.environ | env, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            begun = time.monotonic()
            while not Path(folder, "control").exists():
                if process.poll() is not None or time.monotonic() > begun + 10:
                    process.kill()
                    words = process.communicate()[0]
                    raise NotAvailable(f"{DAEMON} does not start: {words.strip()[-300:]}")
                time.sleep(0.05)
            yield env
        finally:
            with contextlib.suppress(Exception):
                subprocess.run(
                    [DAEMON], env=os.environ | env, input="quit -t 2\n", text=True, timeout=8,
                    check=False, capture_output=True,
                )  # fmt: skip
            process.kill()
            process.wait()
