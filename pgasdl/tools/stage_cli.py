"""``pgasdl stage``: bring a data set to this machine's disk before a job reads it."""

from __future__ import annotations

import time
from pathlib import Path

import click

from pgasdl.input.formats import FORMATS
from pgasdl.input.records import Records
from pgasdl.tools.command import Names, ToolCommand, json_option
from pgasdl.tools.text import parse_size, write_json

_HELP = """\
Bring a data set (files, folders, patterns or URLs) to a folder of this machine, where jobs find it
that name the same folder: Records(..., local=FOLDER). What is there already stays; each block is
checked.
"""


@click.command("stage", cls=ToolCommand, help=_HELP)
@click.argument("remote", nargs=-1, required=True, metavar="REMOTE...")
@click.option("--local", required=True, metavar="FOLDER", help="Where to.")
@click.option(
    "--format", "form", type=Names(tuple(FORMATS), "format"), help="Unless the names say it."
)
@click.option("--limit", metavar="SIZE", help="Most bytes in FOLDER, as in 512M or 50G.")
@json_option
def command(
    remote: tuple[str, ...], local: str, form: str | None, limit: str | None, as_json: bool
) -> int:
    """Stage a data set, and say what is there."""
    began = time.monotonic()
    with Records(
        list(remote),
        format=form,
        local=Path(local).absolute(),
        cache_limit=parse_size(limit) if limit else None,
        memory=0,
    ) as records:
        held = records.stage()
        document = {
            "records": len(records),
            "format": records.format,
            "files": len(records.files),
            "bytes": records.files.nbytes,
            "bytes_held": held,
            "bytes_from_storage": records.counters().storage,
            "seconds": time.monotonic() - began,
        }
    whole = records.files.nbytes
    if as_json:
        write_json(document)
    else:
        click.echo(
            f"{document['records']} records in {document['files']} files ({document['format']}): "
            f"{_mib(held)} of {_mib(whole)} in {local}, "
            f"{_mib(records.counters().storage)} from storage, {document['seconds']:.1f} s"
        )
    return 0 if held == whole else 1


def _mib(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"
