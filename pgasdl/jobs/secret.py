"""The secret of one job: with it a program may report for this job, and for no other.

It lies in the job's folder, with mode 0600, and is new each time the job is started.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets

from pgasdl.jobs.places import Places, regular_bytes
from pgasdl.jobs.requests import LARGEST

_PATHS = re.compile(r"/api/v1/jobs/([0-9]{1,16})/(?:commands|reports)")


def write(places: Places, job: int) -> None:
    """Make a new secret, in the file by which the program finds the server."""
    file = places.link(job)
    new = file.with_name(file.name + ".new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    document = {"job": job, "token": secrets.token_urlsafe(32), "url": str(places.url)}
    with open(descriptor, "w", encoding="utf-8") as writing:
        json.dump(document, writing)
    new.replace(file)


def job_of(path: str) -> int | None:
    """Return the job whose program alone may use a path; None: the path is for users."""
    found = _PATHS.fullmatch(path)
    return int(found[1]) if found else None


def of(places: Places, job: int) -> str:
    """Return the secret of a job; if there is no such job, a random one that nobody knows."""
    if 1 <= job <= LARGEST:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(regular_bytes(places.link(job)))["token"])
    return secrets.token_urlsafe(32)
