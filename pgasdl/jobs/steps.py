"""The folder of a step, the same for every runner: files that its supervisor reads and writes."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pgasdl.jobs import secret
from pgasdl.jobs.job import JobRow
from pgasdl.jobs.places import Places, folder_of, inside, program_of, regular_bytes
from pgasdl.jobs.runner import Kind, Lost, StepEnd
from pgasdl.jobs.supervisor import BEGUN, COMMAND, OUTCOME

PGASDL = (sys.executable, "-P", "-m", "pgasdl")
REMOVED = Lost("its folder was removed, and its supervisor was killed")
_OUTCOME_BYTES = 4096
_SECRET = "secret"  # noqa: S105 - of the ranks among each other: a file's name


def lay_out(
    places: Places,
    root: Path,
    job: JobRow,
    kind: Kind,
    launcher: Sequence[str],
    stop: Sequence[str] = (),
) -> Path:
    """Make the folders of the present step and its command.

    The ranks' secret lies in the step's folder; pgasdl's own launcher makes another one.
    ``launcher`` starts the ranks; ``stop`` sends them SIGTERM, and if it is empty the launcher does
    so when it gets the signal.
    """
    command = _command(places, root, job, kind, launcher, stop)
    step = places.step(job.id, job.step)
    own = (places.own(job.id), places.records(job.id))
    for folder in (step.parent.parent, step.parent, step, *own):
        folder.mkdir(mode=0o700, exist_ok=True)
    secret.write(places, job.id)
    _write_secret(step / _SECRET)
    (step / COMMAND).write_text(json.dumps(command), encoding="utf-8")
    return step


def _write_secret(file: Path) -> None:
    file.unlink(missing_ok=True)  # an earlier server may have ended before it started the step
    descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with open(descriptor, "wb") as writing:
        writing.write(os.urandom(32))


def set_aside(step: Path) -> None:
    """Reserve space for the outcome before anything starts: the disk may be full later."""
    descriptor = os.open(step / BEGUN, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _OUTCOME_BYTES)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def outcome(step: Path) -> StepEnd | None:
    """Return the outcome that a supervisor wrote; None: there is none, or it is damaged."""
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        return StepEnd.from_json(json.loads(regular_bytes(step / OUTCOME)))
    return None


def _command(
    places: Places,
    root: Path,
    job: JobRow,
    kind: Kind,
    launcher: Sequence[str],
    stop: Sequence[str],
) -> dict[str, Any]:
    """Return the command for the supervisor; the paths are checked again, now."""
    request = job.request
    folder = folder_of(root, request.folder)
    if kind == "stage":
        assert request.stage is not None
        local = inside(root, request.stage.local, "stage.local", base=folder)
        words = [*PGASDL, "stage", f"--local={local}"]
        words += [f"--format={request.stage.format}"] if request.stage.format else []
        words += [f"--limit={request.stage.limit}"] if request.stage.limit else []
        words += ["--", *request.stage.remote]
    else:
        words = [*launcher, *program_of(root, folder, request.program)]
    trace = {"PGASDL_TRACE": str(places.records(job.id))}
    own = {
        "PGASDL_JOB_FOLDER": str(places.own(job.id)),
        "PGASDL_JOB_LINK": str(places.link(job.id)),
        "PGASDL_SECRET_FILE": str(places.step(job.id, job.step) / _SECRET),
    }
    return {
        "kind": kind,
        "words": words,
        "stop": [] if kind == "stage" else list(stop),
        "folder": str(folder),
        "environment": {**trace, **request.environment, **own},
        "log": str(places.log(job.id)),
        "grace": request.grace,
    }
