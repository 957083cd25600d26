"""``pgasdl doctor``: tries what this machine offers, and says how to get the rest.

It needs click and the standard library only: if the native module or numpy cannot be imported, that
is its first finding. OK: available. WARN: pgasdl works without it, slower or in part. FAIL: pgasdl
cannot work here.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

import click

from pgasdl import _load_native
from pgasdl.config import Config
from pgasdl.errors import ConfigError
from pgasdl.tools import gpus, network, probes, rdma
from pgasdl.tools.probes import ProbeResult
from pgasdl.tools.text import write_json
from pgasdl.transports import TRANSPORTS

_MIB = 1 << 20
_COLOURS = {"OK": "green", "WARN": "yellow", "FAIL": "red"}


def main(as_json: bool = False) -> int:
    """Print the report; return 1 when something is FAIL, else 0."""
    findings = diagnose()
    if as_json:
        write_json([asdict(finding) for finding in findings])
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            status = click.style(f"{finding.status:<4}", fg=_COLOURS[finding.status])
            click.echo(f"{status}  {finding.name:<{width}}  {finding.detail}")
            if finding.fix:
                click.echo(f"{'':<4}  {'':<{width}}  fix: {finding.fix}")
        counts = {s: sum(f.status == s for f in findings) for s in _COLOURS}
        click.echo(
            ", ".join(
                click.style(f"{n} {status}", fg=_COLOURS[status] if n else None)
                for status, n in counts.items()
            )
        )
    return int(any(finding.status == "FAIL" for finding in findings))


def diagnose() -> list[ProbeResult]:
    """Run every probe; a probe that fails is a finding, too."""
    findings = []
    for name, probe in PROBES:
        try:
            findings.append(probe(name))
        except Exception as error:  # a probe must never end the report
            findings.append(ProbeResult(name, "FAIL", f"{type(error).__name__}: {error}"))
    return findings


def _python(name: str) -> ProbeResult:
    text = f"{platform.python_version()} on {platform.machine()}, Linux {platform.release()}"
    if sys.platform != "linux":
        return ProbeResult(name, "FAIL", f"{text}, {sys.platform}", "pgasdl needs Linux")
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        return ProbeResult(name, "WARN", text, "tested with Python 3.11 to 3.14")
    return ProbeResult(name, "OK", text)


def _package(name: str) -> ProbeResult:
    try:
        return ProbeResult(name, "OK", importlib.metadata.version("pgasdl"))
    except importlib.metadata.PackageNotFoundError:
        return ProbeResult(name, "WARN", "runs from a source tree, not installed", "pip install .")


def _native(name: str) -> ProbeResult:
    try:
        native = _load_native()
    except ImportError as error:
        return ProbeResult(name, "FAIL", f"cannot be imported: {error}", rdma.FIXES["native"])
    parts = []
    for attribute in ("__version__", "version", "isa"):
        value = getattr(native, attribute, None)
        if value is not None:
            parts.append(f"{attribute.strip('_')} {value() if callable(value) else value}")
    return ProbeResult(name, "OK", ", ".join(parts) or "imports")


def _cores(name: str) -> ProbeResult:
    n_cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    text = f"{n_cores} usable, load {load:.1f}"
    if load > 0.5 * n_cores:
        return ProbeResult(
            name, "WARN", text, "other work is running: measurements will be disturbed"
        )
    return ProbeResult(name, "OK", text)


def _store(name: str) -> ProbeResult:
    """Start one rank against a real store."""
    from pgasdl.runtime.bootstrap import StoreClient, StoreServer

    secret = secrets.token_bytes(32)
    with (
        StoreServer(secret, 1) as server,
        StoreClient(server.address, secret, 0, 1, "", 5) as client,
    ):
        started = time.perf_counter()
        client.put("doctor", b"x")
        client.get("doctor")
        elapsed = time.perf_counter() - started
    return ProbeResult(name, "OK", f"authenticated over TCP, put and get {elapsed * 1e6:.0f} us")


def _launcher(name: str) -> ProbeResult:
    from pgasdl.config import Config, listing
    from pgasdl.errors import ConfigError
    from pgasdl.runtime.bootstrap.detect import detect

    _, problems = listing()
    if problems:
        return ProbeResult(name, "FAIL", "; ".join(problems), "see `pgasdl env`")
    try:
        launch = detect(Config.from_environment())
    except ConfigError as error:
        return ProbeResult(name, "FAIL", str(error), "see `pgasdl env`")
    return ProbeResult(name, "OK", f"{launch.kind}: rank {launch.rank} of {launch.size}")


def _needed(name: str) -> ProbeResult:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        return ProbeResult(name, "FAIL", f"cannot be imported: {error}", f"pip install {name}")
    return ProbeResult(name, "OK", str(getattr(module, "__version__", "imports")))


def _torch(name: str) -> ProbeResult:
    version = _installed(name)
    if version is None:
        return ProbeResult(name, "OK", "not installed (optional)")
    first, end = tested_torch()
    if not first <= _numbers(version) < end:
        bounds = f">={_dotted(first)},<{_dotted(end)}"
        return ProbeResult(
            name, "WARN", f"{version}, tested with {bounds}", f"pip install 'torch{bounds}'"
        )
    return ProbeResult(name, "OK", version)


def tested_torch() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the first version that extra `torch` admits, and the first that it does not."""
    for line in importlib.metadata.requires("pgasdl") or ():
        if re.match(r"torch\b", line):
            bounds = dict(re.findall(r"(>=|<)\s*([\d.]+)", line))
            return _numbers(bounds[">="]), _numbers(bounds["<"])
    raise LookupError("pgasdl's metadata name no torch: install it anew")


def _numbers(version: str) -> tuple[int, ...]:
    """Return (2, 14) of 2.14.1+cpu."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _optional(name: str) -> ProbeResult:
    return ProbeResult(name, "OK", _installed(name) or "not installed (optional)")


_MPI_WORDS = """
import json
from mpi4py import MPI
from pgasdl.runtime.mpi.library import threads, version
abi = "pointers" if MPI._sizeof(MPI.Comm) == 8 else "integers"
print(json.dumps([version(MPI), MPI.Get_version(), threads(MPI), abi]))
"""


def _mpi(kind: str) -> ProbeResult:
    """Start one MPI alone; report its version, and what its launcher refuses."""
    from pgasdl.errors import UnavailableError
    from pgasdl.runtime.launch import mpiexec

    if importlib.util.find_spec("mpi4py") is None:
        return ProbeResult(kind, "OK", f"no mpi4py (optional: {mpiexec.INSTALL})")
    try:
        found = mpiexec.find(kind)
    except UnavailableError as error:
        return ProbeResult(kind, "OK", f"{error} (optional)")
    done = subprocess.run(
        [sys.executable, "-P", "-c", _MPI_WORDS],
        env=found.environ() | dict(os.environ) | {"MPI4PY_LIBMPI": found.library},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if done.returncode != 0:
        words = " ".join(done.stderr.split())[-300:]
        return ProbeResult(
            kind, "WARN", f"{found.library} does not start: {words}", mpiexec.INSTALL
        )
    version, (major, minor), threads, abi = json.loads(done.stdout.splitlines()[-1])
    text = (
        f"{version} (MPI {major}.{minor}), {found.library} by {found.program}; handles are {abi}; "
        f"threads: {threads}"
    )
    if kind != "openmpi":
        return ProbeResult(kind, "OK", text)
    refused = []
    if os.geteuid() == 0 and "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM" not in os.environ:
        refused.append("root")
    n_cores = len(os.sched_getaffinity(0))
    refused.append(f"more ranks than {n_cores} cores")
    fix = "`pgasdl run --mpi=openmpi` allows it; by hand: OMPI_ALLOW_RUN_AS_ROOT=1 and "
    fix += "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, mpirun --oversubscribe"
    return ProbeResult(kind, "OK", f"{text}; its launcher refuses {' and '.join(refused)}", fix)


def _installed(name: str) -> str | None:
    """Return the version of an installed package, without the import, which may take seconds."""
    if importlib.util.find_spec(name) is None:
        return None
    for distribution in importlib.metadata.packages_distributions().get(name, [name]):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return "version unknown"


def _survey() -> rdma.Survey:
    """Survey the devices with a context's settings."""
    return rdma.survey(_config())


def _config() -> Config:
    """Return a context's settings; another finding reports wrong variables."""
    try:
        return Config.from_environment()
    except ConfigError:
        return Config.from_environment({})


def _devices(name: str) -> ProbeResult:
    found = _survey()
    parts = []
    for address in found.addresses:
        where = f"{address.device} port {address.port} GID {address.gid_index}"
        if address.gid_index < 0:
            where = address.device
        parts.append(f"{where}: {'chosen' if address.chosen else address.refused}")
    if not parts:
        return ProbeResult(
            name, "WARN", f"{found.missing} (needed for transport verbs only)", found.fix
        )
    text = "; ".join(parts)
    return ProbeResult(name, "OK" if found.chosen else "WARN", text, found.fix)


def _gpus(name: str) -> ProbeResult:
    found = gpus.survey()
    if not found.gpus:
        text = f"no GPU: {found.missing}"
        if gpus.driver_version() is None:
            return ProbeResult(name, "OK", f"{text} (needed for memory on GPUs only)")
        return ProbeResult(name, "WARN", text, "see what nvidia-smi says")
    text = "; ".join([*(gpus.line(gpu, found) for gpu in found.gpus), *gpus.common(found)])
    if rdma.kernel_devices() and not all(gpus.rdma_by(gpu, found) for gpu in found.gpus):
        text += "; RDMA devices reach no memory of GPUs: it passes through the host's"
        fix = (
            "modprobe nvidia-peermem, or a kernel of 5.12 or newer and NVIDIA's open kernel module"
        )
        return ProbeResult(name, "WARN", text, fix)
    return ProbeResult(name, "OK", text)


def _verbs(name: str) -> ProbeResult:
    """Report each step up to an open device, or up to the first that fails."""
    found = _survey()
    passed: list[str] = []
    for stage, words in (
        ("native", "native module"),
        ("build", "built with it"),
        ("library", "libibverbs loads"),
        ("device", "a device opens"),
    ):
        if found.stage == stage:
            return ProbeResult(name, "WARN", "; ".join([*passed, found.missing]), found.fix)
        passed.append(words)
    return ProbeResult(name, "OK", ", ".join(passed))


def _transport(name: str) -> ProbeResult:
    """Report whether this build has a transport."""
    row = TRANSPORTS[name.partition(" ")[0]]
    if row.devices:
        return _verbs(name)
    try:
        left_out = _load_native().transports()[row.name]
    except ImportError:
        missing = "the native module cannot be imported"
        return ProbeResult(name, "WARN", missing, rdma.FIXES["native"])
    if left_out:
        return ProbeResult(name, "WARN", left_out, "pip install --force-reinstall .")
    if row.name != "tcp":
        return ProbeResult(name, "OK", row.summary)
    place, wrong = network.tcp(_config())
    if wrong:
        return ProbeResult(name, "WARN", wrong, "see `ip address`; needed between machines only")
    return ProbeResult(name, "OK", f"{row.summary}, at {place}")


PROBES: tuple[tuple[str, Callable[[str], ProbeResult]], ...] = (
    ("python", _python),
    ("pgasdl", _package),
    ("native module", _native),
    ("cores", _cores),
    ("memfd, sealed", probes.memfd),
    ("pidfd", probes.pidfd),
    ("process_vm_readv", probes.process_vm),
    ("membarrier", probes.membarrier),
    ("RLIMIT_MEMLOCK", probes.memlock),
    ("RLIMIT_NOFILE", probes.nofile),
    ("memory", probes.memory),
    ("start-up store", _store),
    ("launcher", _launcher),
    ("numpy", _needed),
    ("ml_dtypes", _needed),
    ("torch", _torch),
    ("cupy", _optional),
    ("mpi4py", _optional),
    ("mpich", _mpi),
    ("openmpi", _mpi),
    ("GPUs", _gpus),
    ("RDMA devices", _devices),
    *((f"{row.name} transport", _transport) for row in TRANSPORTS.values() if row.processes),
)
