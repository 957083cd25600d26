"""Instructions per message in user space: a stream of 8-byte writes over verbs, and ib_write_bw's.

Counted by valgrind's callgrind, so neither load nor clock matters. What a run takes however long it
is falls out: two lengths are counted and the difference is divided. Whoever spins for completions
counts for more, so the least of several runs is shown. Left out on both sides: libc (locks), the
kernel, and Python around our own stream.

    python apps/count_instructions.py        # where there is an RDMA device, perftest and valgrind
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pgasdl
from pgasdl import _native

NBYTES = 8
LENGTHS = (2000, 8000)
N_RUNS = 3
PORT = 29731
PATIENCE = 120.0  # seconds
PROVIDER = "RDMA provider"
OBJECTS = {  # parts of their names, and what they are called here
    "_native": "pgasdl",
    "ib_write_bw": "ib_write_bw",
    "-rdmav": PROVIDER,
    "libibverbs.so": PROVIDER,
}
LINE = re.compile(r"^\s*([\d,]+) \(.*\[(.*)\]$")


def counted(folder: Path, command: list[str], environ: dict[str, str]) -> Counter[str]:
    """Run a command under callgrind; instructions by object."""
    out = folder / f"callgrind.{secrets.token_hex(4)}"
    tool = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}"]
    subprocess.run(
        [*tool, *command], env=environ, check=True, capture_output=True, timeout=PATIENCE
    )
    table = subprocess.run(
        ["callgrind_annotate", "--threshold=100", str(out)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found: Counter[str] = Counter()
    for number, path in (match.groups() for match in map(LINE.match, table.splitlines()) if match):
        for part, name in OBJECTS.items():
            if part in Path(path).name:
                found[name] += int(number.replace(",", ""))
    return found


@contextlib.contextmanager
def beside(command: list[str], environ: dict[str, str]) -> Iterator[None]:
    """The other side of what is counted; it ends with it, one way or the other."""
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL) as process:
        try:
            yield
            process.wait(PATIENCE)
        finally:
            process.kill()


def await_listener() -> None:
    """perftest says nowhere that it listens; the kernel does."""
    deadline = time.monotonic() + PATIENCE
    listens = re.compile(rf":{PORT:04X} [0-9A-F:]+ 0A ")
    while not any(
        listens.search(Path(f"/proc/net/{name}").read_text()) for name in ("tcp", "tcp6")
    ):
        if time.monotonic() > deadline:
            raise SystemExit(f"ib_write_bw does not listen on port {PORT}")
        time.sleep(0.02)


def stream(n_messages: int) -> None:
    """One rank of ours."""
    # Under valgrind a rank is slow, not stopped.
    with pgasdl.init(transport="verbs", timeout=100, heartbeat_ms=5000, stopped_after=60) as ctx:
        segment = ctx.segment(8192, notifications=1)
        ctx.barrier()
        if ctx.rank == 0:
            _native.streamed_writes(ctx, segment, NBYTES, 4096, n_messages)
        ctx.barrier()


def ours(folder: Path, n_messages: int) -> Counter[str]:
    secret = folder / "secret"
    if not secret.exists():
        secret.touch(0o600)
        secret.write_bytes(secrets.token_bytes(32))
    job = {
        "PGASDL_SIZE": "2",
        "PGASDL_STORE": f"127.0.0.1:{PORT}",
        "PGASDL_LOG": "warning",
        "PGASDL_SECRET_FILE": str(secret),
    }
    ranks = [{**os.environ, **job, "PGASDL_RANK": str(rank)} for rank in range(2)]
    command = [sys.executable, __file__, str(n_messages)]
    with beside(command, ranks[1]):
        return counted(folder, command, ranks[0])


def perftest(folder: Path, n_messages: int) -> Counter[str]:
    devices = _native.verbs_devices(_native.VerbsOptions())
    device = next(device for device in devices if device.chosen)
    command = (
        f"ib_write_bw -F -d {device.device} -x {device.gid_index} -s {NBYTES} -n {n_messages} "
        f"-t 128 -p {PORT}"
    ).split()
    with beside(command, dict(os.environ)):
        await_listener()
        address = device.gid.rpartition(":")[2]
        return counted(folder, [*command, address], dict(os.environ))


def main() -> None:
    short, long = LENGTHS
    with tempfile.TemporaryDirectory(prefix="pgasdl-count-") as name:
        for way in (ours, perftest):
            runs = []
            for _ in range(N_RUNS):
                before, after = way(Path(name), short), way(Path(name), long)
                runs.append({part: (after[part] - before[part]) / (long - short) for part in after})
            least = min(runs, key=lambda run: sum(run.values()))
            parts = ", ".join(f"{part} {count:.0f}" for part, count in sorted(least.items()))
            print(f"{way.__name__}: {sum(least.values()):.0f} instructions a message ({parts})")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        stream(int(sys.argv[1]))
    else:
        main()
