"""Builds the kernel of the guests: User Mode Linux with the drivers of Soft-RoCE and soft iWARP.

``python tests/softroce/kernel.py`` installs the Debian packages that are missing (build tools, and
what guests run), fetches Debian's kernel source, and puts the finished program into
``$XDG_CACHE_HOME/pgasdl/softroce/`` (``~/.cache`` by default), outside every checkout. Its name
holds the version and a hash of the configuration, so a changed kernel.config makes a new kernel.
If that file exists, only missing packages are installed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

VERSION = "7.3"
SUITE = "trixie-backports"  # Debian 12 itself has 6.1, whose UML has one processor
CONFIG = Path(__file__).resolve().with_name("kernel.config")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"

BUILD_PACKAGES = ("gcc", "libc6-dev", "make", "flex", "bison", "bc", "libelf-dev", "xz-utils")
GUEST_PACKAGES = (
    "rdma-core",
    "ibverbs-utils",
    "ibverbs-providers",
    "libibverbs-dev",
    "perftest",
    "python3-pyverbs",
    "iproute2",
    "busybox-static",
)


def path() -> Path:
    """Where the kernel is, or will be once built."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.sha256(CONFIG.read_bytes()).hexdigest()[:12]
    return Path(cache, "pgasdl", "softroce", f"linux-{VERSION}-{digest}")


def main() -> int:
    """Install packages, build the kernel unless it exists, and print where it is."""
    parser = argparse.ArgumentParser(description="Build the kernel of the soft-RoCE guests.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at a time")
    jobs = parser.parse_args().jobs
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # to remove temporary files
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    kernel = path()
    built = kernel.exists()
    install(GUEST_PACKAGES if built else BUILD_PACKAGES + GUEST_PACKAGES)
    if not built:
        with _alone(kernel.parent):
            if not kernel.exists():  # another builder may have been first
                build(kernel, jobs)
    print(kernel)
    return 0


def install(packages: Sequence[str]) -> None:
    """Install those Debian packages that are missing, as root or with sudo."""
    absent = [package for package in packages if not _is_installed(package)]
    if not absent:
        return
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if sudo and not _may_sudo():
        sys.exit(f"missing packages, and no root to install them: {' '.join(absent)}")
    _call([*sudo, "apt-get", "-q", "update"])
    _call([*sudo, "apt-get", "-qq", "install", "-y", "--no-install-recommends", *absent])


def build(kernel: Path, jobs: int) -> None:
    """Fetch, configure and compile, in a folder that is removed afterwards."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pgasdl-kernel-", dir=_roomy_folder()) as name:
        tree = fetch(Path(name))
        make = ["make", "-s", f"-j{jobs}", "ARCH=um"]
        _call([*make, f"KCONFIG_ALLCONFIG={CONFIG}", "allnoconfig"], cwd=tree)
        if lost := lost_options(CONFIG.read_text(), (tree / ".config").read_text()):
            sys.exit("the kernel's configuration refused: " + ", ".join(lost))
        print("compiling: about 10 minutes of processor time", file=sys.stderr, flush=True)
        _call([*make, "linux"], cwd=tree)
        _call(["strip", "linux"], cwd=tree)
        # The file is complete under its final name, or does not exist.
        unfinished = kernel.with_name(f".{kernel.name}.{os.getpid()}")
        try:
            shutil.copy2(tree / "linux", unfinished)
            unfinished.replace(kernel)
        finally:
            unfinished.unlink(missing_ok=True)
    print(f"built in {time.monotonic() - began:.0f} s", file=sys.stderr)


def fetch(folder: Path) -> Path:
    """Debian's kernel source, unpacked below ``folder``.

    It comes from the archive that the machine's apt uses for Debian, through a separate source list
    and separate caches, checked against Debian's key: the machine's configuration need not know
    the suite, and is not changed.
    """
    apt = folder / "apt"
    for part in ("state/lists/partial", "cache/archives/partial"):
        (apt / part).mkdir(parents=True)
    sources = apt / "sources.list"
    sources.write_text(f"deb [signed-by={KEYRING}] {debian_archive()} {SUITE} main\n")
    get = ["apt-get", "-q", "-o", f"Dir::Etc::sourcelist={sources}"]
    get += ["-o", "Dir::Etc::sourceparts=/dev/null", "-o", f"Dir::State={apt}/state"]
    get += ["-o", "Dir::State::status=/var/lib/dpkg/status", "-o", f"Dir::Cache={apt}/cache"]
    get += ["-o", f"APT::Sandbox::User={_user()}"]
    _call([*get, "update"], cwd=folder)
    _call([*get, "download", f"linux-source-{VERSION}"], cwd=folder)
    (package,) = folder.glob("linux-source-*.deb")
    _call(["dpkg-deb", "-x", str(package), "unpacked"], cwd=folder)
    package.unlink()
    archive = folder / f"unpacked/usr/src/linux-source-{VERSION}.tar.xz"
    _call(["tar", "-xf", str(archive)], cwd=folder)
    shutil.rmtree(folder / "unpacked")
    return folder / f"linux-source-{VERSION}"


def debian_archive() -> str:
    """Where the machine's apt gets Debian from."""
    targets = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Origin: Debian"]
    found = subprocess.run([*targets, "Label: Debian"], check=False, capture_output=True, text=True)
    if not found.stdout:
        sys.exit("apt has no lists of a Debian archive: configure one, and run apt-get update")
    return found.stdout.split()[0]


def lost_options(wanted: str, got: str) -> list[str]:
    """The lines of ``wanted`` that ``got`` lacks: a dependency or a rename removed them."""
    there = set(got.splitlines())
    options = [line for line in wanted.splitlines() if line.startswith("CONFIG_")]
    return [line for line in options if line not in there]


def _may_sudo() -> bool:
    """Whether sudo is there and asks for no password."""
    if shutil.which("sudo") is None:
        return False
    return subprocess.run(["sudo", "-n", "true"], check=False, capture_output=True).returncode == 0


def _is_installed(package: str) -> bool:
    query = ["dpkg-query", "-W", "-f", "${db:Status-Status}", package]
    try:
        found = subprocess.run(query, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        sys.exit("no dpkg-query: this needs Debian or one of its kin")
    return found.stdout == "installed"


def _user() -> str:
    """The user that apt is to run as: the one it takes by itself cannot write here."""
    import pwd

    return pwd.getpwuid(os.geteuid()).pw_name


def _roomy_folder() -> str:
    """A folder on disk for 3 GB; /tmp may be memory."""
    return os.environ.get("TMPDIR", "/var/tmp")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait for another builder rather than repeat its work."""
    folder.mkdir(parents=True, exist_ok=True)
    with Path(folder, "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _call(command: Sequence[str], cwd: Path | None = None) -> None:
    """Run one step, in a process group that ends with this process."""
    print("+", " ".join(command), file=sys.stderr, flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    step = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        process_group=0,
    )
    try:
        status = step.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(step.pid, signal.SIGTERM)
        step.wait()
        raise
    if status != 0:
        sys.exit(f"status {status}: {' '.join(command)}")


if __name__ == "__main__":
    raise SystemExit(main())
