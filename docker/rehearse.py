"""Runs the steps of the Dockerfiles in chroots, where no Docker engine is to be had. Needs root.

    debootstrap --variant=minbase bookworm BASE
    python docker/rehearse.py BASE WORK docker/Dockerfile docker/Dockerfile.test

Every step of every stage is run as it stands in the file, on a layer over BASE (in place of
debian:12-slim) or over the stage it names. Images end as the folders WORK/<file>/root, to be
unmounted by --clean. Not what Docker does: no isolation but mount and process spaces, and of the
instructions only those that these files use. EXTRA_INDEX and other ARGs come from the environment.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"  # the host's, for pip


def main() -> None:
    if sys.argv[1] == "--clean":
        clean(Path(sys.argv[2]))
        return
    base, work, *files = (Path(argument).absolute() for argument in sys.argv[1:])
    images = {"debian:12-slim": base}
    environments: dict[Path, dict[str, str]] = {}
    for file in files:
        name = "pgasdl" if file.suffix == "" else "pgasdl-test"
        images[name] = rehearse(file, work, images, environments)


def rehearse(
    file: Path, work: Path, images: dict[str, Path], environments: dict[Path, dict[str, str]]
) -> Path:
    """The root folder of the image that a Dockerfile makes; its variables go to `environments`."""
    stages = dict(images)
    variables: dict[str, str] = {}
    root, user, folder = Path("/"), "root", "/"
    n_stages = 0
    for instruction, text in instructions(file):
        print(f"{file.name}: {instruction} {text[:100]}", flush=True)
        if instruction == "FROM":
            source, _, name = expand(text, variables).partition(" AS ")
            variables = dict(environments.get(stages[source], {}))
            root = layer(stages[source], work / file.name / f"stage{n_stages}")
            environments[root] = variables
            stages[name] = root
            user, folder, n_stages = "root", "/", n_stages + 1
        elif instruction == "ARG":
            name, _, default = text.partition("=")
            variables[name] = os.environ.get(name, default)
        elif instruction == "ENV":
            name, _, value = text.partition("=")
            variables[name] = value
        elif instruction == "WORKDIR":
            folder = text
            (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif instruction == "USER":
            user = text
        elif instruction == "COPY":
            copy(text, root, folder, stages, file)
        elif instruction == "RUN":
            run(text, root, folder, user, variables)
        elif instruction == "CMD":
            words = re.findall(r'"([^"]*)"', os.environ.get("CMD", text))
            run(shlex.join(words), root, folder, user, variables)
        else:
            sys.exit(f"{file}: {instruction} is not known here")
    return root


def instructions(file: Path) -> list[tuple[str, str]]:
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined) if word]


def expand(text: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda match: variables[match[1]], text)


def layer(below: Path, place: Path) -> Path:
    """A new root over another one."""
    if (place / "root").is_mount():
        subprocess.run(["/bin/umount", "--recursive", place / "root"], check=True)
    shutil.rmtree(place, ignore_errors=True)
    for name in ("upper", "work", "root"):
        (place / name).mkdir(parents=True)
    # Of a stage that is itself a layer: its own folders, an overlay is no lower layer of another.
    lower = str(below)
    if (below.parent / "upper").is_dir():
        lower = f"{below.parent / 'upper'}:{(below.parent / 'lower').read_text()}"
    (place / "lower").write_text(lower)
    options = f"lowerdir={lower},upperdir={place / 'upper'},workdir={place / 'work'}"
    subprocess.run(
        ["/bin/mount", "-t", "overlay", "-o", options, "overlay", place / "root"], check=True
    )
    shutil.copy("/etc/resolv.conf", place / "root/etc/resolv.conf")
    shutil.copy(CERTIFICATES, place / "root/host-certificates.crt")
    return place / "root"


def copy(text: str, root: Path, folder: str, stages: dict[str, Path], file: Path) -> None:
    words = text.split()
    source = REPOSITORY
    if words[0].startswith("--from="):
        source = stages[words.pop(0).removeprefix("--from=")]
    *names, target = words
    end = root / os.path.normpath(f"{folder}/{target}" if target[0] != "/" else target).lstrip("/")
    for name in names:
        here = source / name.lstrip("/")
        if here.is_file():
            end = end / here.name if target.endswith("/") else end
            end.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(here, end)
            end = end.parent if target.endswith("/") else end
        elif source == REPOSITORY:
            skip = shutil.ignore_patterns(
                ".git", "build", "*.so", "*.whl", "__pycache__", ".*_cache"
            )
            shutil.copytree(here, end, ignore=skip, dirs_exist_ok=True)
        else:
            shutil.copytree(here, end, symlinks=True, dirs_exist_ok=True)


def run(text: str, root: Path, folder: str, user: str, variables: dict[str, str]) -> None:
    """A shell line in the root, with /proc, /sys and a few devices, in spaces of its own."""
    script = f"""
mount -t proc proc {root}/proc && mount --bind /sys {root}/sys && mount --bind /dev {root}/dev &&
exec chroot --userspec={user}:{user} {root} /bin/sh -c {shlex.quote(f"cd {folder} && {text}")}"""
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root" if user == "root" else f"/home/{user}",
        "DEBIAN_FRONTEND": "noninteractive",
        "LANG": "C.UTF-8",
        "PIP_CERT": "/host-certificates.crt",
        **{name: value for name, value in os.environ.items() if "proxy" in name.lower()},
        **variables,
    }
    command = ["/usr/bin/unshare", "--mount", "--pid", "--ipc", "--fork", "/bin/sh", "-c", script]
    done = subprocess.run(command, env=environment, check=False)
    if done.returncode != 0:
        sys.exit(f"status {done.returncode}: {text}")


def clean(work: Path) -> None:
    for root in sorted(work.glob("*/*/root")):
        if root.is_mount():
            subprocess.run(["/bin/umount", "--recursive", root], check=True)
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
