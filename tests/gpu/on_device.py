"""All that only a machine with an NVIDIA GPU can show, by one command, in about four minutes.

Install pgasdl from the checkout; without a network::

    pip install --no-build-isolation --no-deps .

(cmake, ninja, nanobind, scikit-build-core, numpy, ml_dtypes and click have to be there.) Then, from
the checkout's root, which holds no compiled module and so must not be first on Python's path::

    python tests/gpu/on_device.py --out on_device.json

It wants the GPU for itself. A part that needs PyTorch, CuPy, a compiler, an MPI or
compute-sanitizer says "not available" without it; a part that fails or is late is noted, and the
others go on. It ends with 0 if all checks held. ``--all`` adds parts that only confirm what held
before, ``--only allreduce,training`` runs some, ``--seconds`` limits all, ``--smoke`` takes tiny
sizes, as tests do on the fake driver. (``pytest tests/gpu`` always puts the fake driver in
front of the driver, there, too.)
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from on_device import findings
from on_device.findings import NotAvailable, Tell

HERE = Path(__file__).parent


class Part(NamedTuple):
    """A module of ``on_device``; ``seconds`` is its deadline.

    ``confirms`` : what it looks at held on every machine so far; it runs with ``--all``
    """

    name: str
    seconds: float
    confirms: bool = False


# First the parts on which the rest relies, then those that are most uncertain.
PARTS = (
    Part("attributes", 40),
    Part("ceilings", 45),
    Part("one_sided", 45),
    Part("collectives", 100),
    Part("several", 130),
    Part("allreduce", 100),
    Part("puts", 30, confirms=True),
    Part("staged", 45),
    Part("training", 45),
    Part("losses", 30),
    Part("graphs", 40),
    Part("foreign", 110, confirms=True),
    Part("attached", 110),
    Part("backend", 90),
    Part("windows", 60),
    Part("mps", 60),
    Part("kernels", 90, confirms=True),
    Part("peers", 70),
    Part("sanitizer", 70, confirms=True),
)
LEAST = 8.0  # seconds in which a part may find something


def run_part(name: str, file: Path, seconds: float, smoke: bool) -> dict[str, Any]:
    """Run one part as a process group of its own; say how it ended and what it found."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, __file__, "--part", name, "--findings", str(file)]
            + ["--smoke"] * smoke,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = {0: "done", 3: "not available"}.get(process.wait(seconds), "failed")
        except subprocess.TimeoutExpired:
            status = f"late: not over after {seconds:.0f} s"
        finally:
            end_group(process)
        output.seek(0)
        words = output.read()[-3000:]
    return {
        "part": name,
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        "findings": findings.read(file),
        "output": words,
    }


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Let launchers end their ranks, then kill what is left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        if number == signal.SIGTERM:
            time.sleep(0.2)
    process.wait()


def be_part(name: str, file: Path, smoke: bool) -> int:
    """Run a part in this process."""
    tell = Tell(file)
    try:
        importlib.import_module("on_device.driver").require_gpu()
        importlib.import_module(f"on_device.{name}").run(tell, smoke)
    except NotAvailable as missing:
        print(missing)
        tell(name, f"not available: {missing}")
        return 3
    return 0


def rows(result: dict[str, Any]) -> Iterable[str]:
    """The table's rows of a part."""
    yield f"== {result['part']}: {result['status']} ({result['seconds']} s)"
    for finding in result["findings"]:
        value = finding["value"]
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        error = finding.get("detail", {}).get("error", "")
        yield f"   {finding['name']:<58} {shown} {finding['unit']} {error[:400]}".rstrip()
    if result["status"] not in ("done", "not available", "skipped"):
        yield from (f"   | {line}" for line in result["output"].splitlines()[-12:])


def all_held(results: list[dict[str, Any]]) -> bool:
    """Whether every part ended, some were there, and every check held."""
    ended = all(result["status"] in ("done", "not available") for result in results)
    something = any(result["status"] == "done" for result in results)
    return (
        ended
        and something
        and all(finding.get("held", True) for result in results for finding in result["findings"])
    )


def write(out: Path, results: list[dict[str, Any]]) -> None:
    """Write what is known so far, whole or not at all."""
    part = out.with_name(f"{out.name}.part")
    part.write_text(json.dumps({"held": all_held(results), "parts": results}, indent=1))
    part.replace(out)


def parse() -> argparse.Namespace:
    """The command line."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=Path("on_device.json"), help="JSON")
    parser.add_argument("--only", help="parts, with commas between")
    parser.add_argument("--all", action="store_true", help="also parts that confirm what held")
    parser.add_argument("--seconds", type=float, default=590, help="for all parts together")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--part", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--findings", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.names = [part.name for part in PARTS if options.all or not part.confirms]
    if options.only:
        options.names = options.only.split(",")
    if unknown := set(options.names) - set(names):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(names)}")
    return options


def main() -> int:
    """Run all parts."""
    options = parse()
    if options.part:
        return be_part(options.part, options.findings, options.smoke)
    deadline = time.monotonic() + options.seconds
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for part in PARTS:
            if part.name not in options.names:
                continue
            seconds = min(part.seconds, deadline - time.monotonic())
            if seconds < LEAST:
                result = {"part": part.name, "status": "skipped", "seconds": 0.0, "findings": []}
            else:
                file = Path(folder) / part.name
                result = run_part(part.name, file, seconds, options.smoke)
            results.append(result)
            print("\n".join(rows(result)), flush=True)
            write(options.out, results)
    held = all_held(results)
    print("all checks held" if held else "NOT all checks held")
    return 0 if held else 1


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(HERE), os.environ.get("PYTHONPATH")))
    )
    sys.exit(main())
