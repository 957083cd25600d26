"""``pgasdl job``: the command of a job server's users."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from pgasdl.errors import ConfigError, JobError, PgasTimeoutError
from pgasdl.jobs import tensorboard
from pgasdl.jobs.client import Client
from pgasdl.jobs.job import State
from pgasdl.jobs.messages import Command
from pgasdl.tools.command import Names, ToolCommand, ToolGroup, json_option
from pgasdl.tools.text import write_json

_ANSWER = 60.0  # seconds for a job to obey
_SUBMIT = """\
Put a job into the queue, and print its number. Everything from the program on is the program's own;
"--" comes before -m.
"""


class _JobNumber(click.types.IntParamType):
    name = "job"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read a number; what is none may be an argument that comes behind it."""
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter:
            path = "" if ctx is None else ctx.command_path
            self.fail(
                f"{value!r} is not the number of a job, which comes first, as in `{path} 1`; "
                "`pgasdl job list` shows the numbers",
                param,
                ctx,
            )


_job = click.argument("job", type=_JobNumber())


@click.group("job", cls=ToolGroup)
@click.option(
    "--server", metavar="URL|FILE", default="",
    help="A URL, or the server's --file; default: PGASDL_JOB_SERVER, or else your own server's.",
)  # fmt: skip
@click.option(
    "--token-file", metavar="FILE", default="", help="Default: jobs.db.token beside that file."
)
@click.pass_context
def command(ctx: click.Context, server: str, token_file: str) -> None:
    """Submit, list, show, follow, watch, stop and restart jobs of a server (`pgasdl serve`)."""
    ctx.obj = lambda: Client.find(server, token_file)


@command.command(
    "submit", cls=ToolCommand, help=_SUBMIT, context_settings={"allow_interspersed_args": False}
)
@click.option("-n", "ranks", type=int, default=1, show_default=True, metavar="N", help="Ranks.")
@click.option("--name", default="", help="For people; default: the program's.")
@click.option("--folder", metavar="FOLDER", help="Where it runs; default: the current folder.")
@click.option(
    "--env", "variables", multiple=True, metavar="NAME=VALUE", help="A variable; repeatable."
)
@click.option(
    "--resource", "resources", multiple=True, metavar="NAME=VALUE",
    help="An option of sbatch, as in partition=gpu, for a server with --slurm; repeatable.",
)  # fmt: skip
@click.option(
    "--restarts", type=int, default=0, show_default=True, metavar="N",
    help="How often it is started again after it failed or was lost.",
)  # fmt: skip
@click.option(
    "--grace", type=int, default=10, show_default=True, metavar="S",
    help="Seconds from SIGTERM to SIGKILL when it is stopped.",
)  # fmt: skip
@click.option(
    "--stage", "remote", multiple=True, metavar="REMOTE",
    help="Data to bring to --local first, as `pgasdl stage` does; repeatable.",
)  # fmt: skip
@click.option("--local", metavar="FOLDER", help="Of --stage: where to.")
@click.option("--format", "form", default="", help="Of --stage: unless the names say it.")
@click.option("--limit", metavar="SIZE", default="", help="Of --stage: most bytes in --local.")
@click.argument("program", nargs=-1, required=True, metavar="[--] (PROGRAM.py | -m MODULE) ...")
@click.pass_context
def _submit(
    ctx: click.Context,
    ranks: int,
    name: str,
    folder: str | None,
    variables: tuple[str, ...],
    resources: tuple[str, ...],
    restarts: int,
    grace: int,
    remote: tuple[str, ...],
    local: str | None,
    form: str,
    limit: str,
    program: tuple[str, ...],
) -> None:
    request: dict[str, Any] = {
        "ranks": ranks,
        "name": name,
        "folder": os.path.realpath("/proc/self/cwd") if folder is None else folder,
        "environment": dict(_pair("--env", text) for text in variables),
        "restarts": restarts,
        "grace": grace,
        "resources": dict(_pair("--resource", text) for text in resources),
    }
    if bool(remote) != (local is not None):
        raise ConfigError("--stage and --local belong together")
    if remote:
        request["stage"] = {"remote": list(remote), "local": local, "format": form, "limit": limit}
    click.echo(ctx.obj().submit(list(program), **request)["id"])


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{option} {text}: NAME=VALUE")
    return name, value


@command.command("list", cls=ToolCommand)
@click.option("--state", type=Names([str(one) for one in State], "state"))
@click.option(
    "-n", "limit", type=int, default=20, show_default=True, metavar="N", help="Most jobs."
)
@json_option
@click.pass_context
def _list(ctx: click.Context, state: str | None, limit: int, as_json: bool) -> None:
    """List jobs, the newest first."""
    jobs = ctx.obj().jobs(limit, state=state or "")["jobs"]
    if as_json:
        return write_json(jobs)
    click.echo(f"{'job':>5} {'state':<9} {'ranks':>5} {'submitted':<19} {'took':>8}  name")
    for job in jobs:
        ranks, submitted = job["request"]["ranks"], _moment(job["submitted"])
        row = f"{job['id']:>5} {job['state']:<9} {ranks:>5} {submitted} {_took(job):>8}"
        click.echo(f"{row}  {job['name']}")
    return None


@command.command("show", cls=ToolCommand)
@_job
@json_option
@click.pass_context
def _show(ctx: click.Context, job: int, as_json: bool) -> None:
    """Show a job."""
    found = ctx.obj().show(job)
    if as_json:
        return write_json(found)
    request = found["request"]
    rows = {
        "job": f"{found['id']}, {found['name']}",
        "state": found["state"] + (f": {found['reason']}" if found["reason"] else ""),
        "status": found["status"],
        "program": " ".join(request["program"]),
        "folder": request["folder"],
        "ranks": request["ranks"],
        "restarts left": found["restarts_left"],
        "submitted": _moment(found["submitted"]),
        "started": _moment(found["started"]),
        "ended": _moment(found["ended"]),
    }
    for name, value in rows.items():
        if value not in (None, ""):
            click.echo(f"{name:<14} {value}")
    return None


@command.command("log", cls=ToolCommand)
@_job
@click.option("--follow", is_flag=True, help="Until it ends.")
@click.pass_context
def _log(ctx: click.Context, job: int, follow: bool) -> None:
    """Print what a job's programs have written."""
    client: Client = ctx.obj()
    for data in client.follow(job) if follow else _pages(client, job):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def _pages(client: Client, job: int) -> Any:
    offset = 0
    while data := client.log(job, offset):
        offset += len(data)
        yield data


@command.command("records", cls=ToolCommand)
@_job
@click.pass_context
def _records(ctx: click.Context, job: int) -> None:
    """Print the flight records that a job's ranks left: their last operations."""
    for record in ctx.obj().records(job):
        click.echo(f"{record['name']}\n{record['text']}")


@command.command("page", cls=ToolCommand)
@click.pass_context
def _page(ctx: click.Context) -> None:
    """Print the address of the page to watch jobs on; it holds the token."""
    client: Client = ctx.obj()
    client.jobs(1)  # no token for a page of somebody else
    click.echo(client.page)


@command.command("wait", cls=ToolCommand)
@_job
@click.option("--timeout", type=float, metavar="S", help="End with 124 after S seconds.")
@click.pass_context
def _wait(ctx: click.Context, job: int, timeout: float | None) -> int:
    """Wait for a job's end, and end with its status: not 0 unless it is done; or 69: no server."""
    if timeout is not None and not timeout >= 0:  # as NaN
        raise ConfigError(f"--timeout {timeout:g}: seconds, from 0")
    try:
        found = ctx.obj().wait(job, timeout)
    except (PgasTimeoutError, JobError) as error:
        if getattr(error, "status", 0):  # the server refuses it
            raise
        click.echo(f"Error: {error}", err=True)
        return 69 if isinstance(error, JobError) else 124
    click.echo(_line(found))
    return 0 if found["state"] == State.DONE else int(found["status"] or 1)


@command.command("send", cls=ToolCommand, context_settings={"ignore_unknown_options": True})
@_job
@click.argument("name")
@click.argument("value", required=False)
@click.pass_context
def _send(ctx: click.Context, job: int, name: str, value: str | None) -> None:
    """Tell a job that trains to start, pause, resume, evaluate, checkpoint or stop.

    Or a NAME that its program knows, such as learning-rate, with a VALUE: JSON, or else a text. It
    waits until all ranks have obeyed; the status is 1 if one failed to, the job refused or ended.
    """
    client: Client = ctx.obj()
    sent = Command(name, None if value is None else _json_or_text(value))
    number = client.send(job, sent.name, sent.value)
    click.echo(number)
    try:
        for event in client.events(job, _ANSWER, after=number):
            if event["event"] == "state":
                raise JobError(f"job {job} is {event['state']} before it obeyed")
            if event.get("command") == number:
                if event["name"] == "obeyed":
                    return
                raise JobError(f"{event['name']} {event['text']}")
    except PgasTimeoutError as error:
        raise PgasTimeoutError(f"no word of it after {_ANSWER:g} s; it may obey later") from error
    raise JobError(f"job {job} ended before it obeyed")


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=lambda name: name)
    except (ValueError, RecursionError):
        return text


@command.command("tensorboard", cls=ToolCommand)
@_job
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--follow", is_flag=True, help="Until it ends.")
@click.pass_context
def _tensorboard(ctx: click.Context, job: int, folder: Path, follow: bool) -> None:
    """Write a job's metrics into FOLDER/job-ID for TensorBoard: `pip install tensorboard`."""
    points = tensorboard.write(ctx.obj(), job, folder, follow=follow)
    click.echo(f"{points} points: tensorboard --logdir {folder}")


def _changing(name: str, what: str) -> None:
    @command.command(name, cls=ToolCommand, help=what)
    @_job
    @click.pass_context
    def _(ctx: click.Context, job: int) -> None:
        change: Callable[[int], dict[str, Any]] = getattr(ctx.obj(), name)
        click.echo(_line(change(job)))


_changing(
    "stop", "End a job: SIGTERM, after its grace SIGKILL. Returns at once: `pgasdl job wait`."
)
_changing("restart", "Run a job that has ended once more, with the folder that it had.")


def _line(job: dict[str, Any]) -> str:
    reason = f": {job['reason']}" if job["reason"] else ""
    return f"job {job['id']} is {job['state']}{reason}"


def _moment(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds).isoformat(" ", "seconds")


def _took(job: dict[str, Any]) -> str:
    if job["started"] is None or job["ended"] is None:
        return ""
    return f"{max(0.0, job['ended'] - job['started']):.1f} s"
