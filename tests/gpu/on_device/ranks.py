"""Ranks: processes started by ``pgasdl run``, each of which calls one function.

``python -m on_device.ranks MODULE:FUNCTION SETTINGS FINDINGS PREFIX`` is such a process.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from on_device.findings import NotAvailable, Tell

HERE = Path(__file__).parents[1]


def run(
    n: int,
    function: str,
    tell: Tell,
    *,
    timeout: float,
    env: dict[str, str] | None = None,
    flags: tuple[str, ...] = (),
    loses: bool = False,
    **settings: Any,
) -> None:
    """Call ``function(ctx, tell, **settings)`` on ``n`` ranks; raise if a rank fails.

    ``loses`` : ranks are killed on purpose
    """
    program = ["-m", "on_device.ranks", function, json.dumps(settings), str(tell.path), tell.prefix]
    command = [sys.executable, "-m", "pgasdl", "run", "-n", str(n), *flags, *program]
    finished(command, timeout=timeout, env=env, fails=loses)


def finished(
    command: list[str],
    *,
    timeout: float,
    env: dict[str, str] | None = None,
    fails: bool = False,
) -> str:
    """The output of a command, which is killed when it is late."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | (env or {})
    try:
        done = subprocess.run(
            command, env=environment, cwd=HERE, timeout=timeout, text=True, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise NotAvailable(str(error)) from None
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
        words = output.decode(errors="replace") if isinstance(output, bytes) else output
        raise TimeoutError(f"not over after {timeout:g} s: {words[-1500:]}") from None
    if done.returncode and not fails:
        raise RuntimeError(f"ended with {done.returncode}: {done.stdout[-2500:]}")
    return done.stdout


def main() -> None:
    """Be a rank."""
    from cuda_arrays import Device

    import pgasdl

    named, settings, findings, prefix = sys.argv[1:]
    module, function = named.split(":")
    program = getattr(importlib.import_module(module), function)
    with Device(), pgasdl.init(log="warning", timeout=20) as ctx:
        program(ctx, Tell(Path(findings), ctx.rank, prefix), **json.loads(settings))


if __name__ == "__main__":
    main()
