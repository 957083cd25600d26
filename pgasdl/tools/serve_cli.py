"""``pgasdl serve``: the job server."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import click

from pgasdl.errors import UnavailableError
from pgasdl.jobs.places import default_file
from pgasdl.jobs.requests import MOST_RANKS
from pgasdl.tools.command import ToolCommand

_HELP = """\
Queue, start and watch jobs of this machine, until SIGTERM or Ctrl-C; jobs that run then run on, and
a server that is started again finds them. `pgasdl job` talks to it.
"""


class _OnceAMinute(logging.Filter):
    """Lets the same message pass once a minute, so that strangers cannot fill the disk by it."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a record."""
        now = time.monotonic()
        words = f"{record.getMessage()} {record.exc_info and record.exc_info[1]!r}"
        self._said = {said: at for said, at in self._said.items() if now < at + 60}
        return self._said.setdefault(words, now) == now


@click.command("serve", cls=ToolCommand, help=_HELP)
@click.option(
    "--file", type=click.Path(path_type=Path), metavar="FILE",
    help="Jobs and their history, on a local disk; default: pgasdl/jobs.db in your state folder.",
)  # fmt: skip
@click.option(
    "--root", type=click.Path(path_type=Path), default=".", metavar="FOLDER",
    help="Jobs run in folders below it; default: the current folder.",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, metavar="N", help="Default: any free one."
)
@click.option(
    "--slots", type=click.IntRange(1), metavar="N",
    help="Ranks at once; default: the cores; with --slurm 65536.",
)  # fmt: skip
@click.option(
    "--slurm", is_flag=True,
    help="Run jobs through Slurm: FILE and FOLDER lie where all nodes reach them, "
    "and so does --host.",
)  # fmt: skip
def command(
    file: Path | None, root: Path, host: str, port: int, slots: int | None, slurm: bool
) -> int:
    """Serve."""
    try:
        from pgasdl.jobs.server import serve
    except ImportError as error:
        raise UnavailableError(f"{error}: pip install 'pgasdl[jobs]'") from error
    handler = logging.StreamHandler()
    handler.addFilter(_OnceAMinute())
    logging.basicConfig(
        level="WARNING", format="pgasdl serve: %(message)s", handlers=[handler], force=True
    )
    most = slots or (MOST_RANKS if slurm else len(os.sched_getaffinity(0)))
    found = file or default_file()

    def ready(url: str, local: bool) -> None:
        if not local:
            click.echo(
                f"pgasdl serve: warning: HTTP is not encrypted: whoever sees the network of {host} "
                "sees the token, which lets start programs here",
                err=True,
            )
        elif slurm:
            click.echo(
                f"pgasdl serve: warning: {host} is this machine's alone: a program that trains on "
                "another node cannot report (--host)",
                err=True,
            )
        click.echo(f"pgasdl serve: {url}, {most} slots, {found}, jobs in {root.resolve()}")

    serve(found, root, host, port, most, ready, slurm=slurm)
    return 0
