"""Who could have written a folder: a group of one is nobody else."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path

import pytest

from pgasdl.trust import who_else_writes


@pytest.mark.parametrize(
    ("name", "members", "others"),
    [
        ("me", [], False),
        ("me", ["me"], False),
        ("me", ["me", "you"], True),
        ("users", [], True),
        (None, [], True),
    ],
)
def test_a_group_that_may_write(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str | None,
    members: list[str],
    others: bool,
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o775)
    group = folder.stat().st_gid
    uid = os.geteuid()
    user = pwd.struct_passwd(("me", "x", uid, group, "", "/", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: user)

    def found(number: int) -> grp.struct_group:
        if name is None:
            raise KeyError(number)
        return grp.struct_group((name, "x", number, members))

    monkeypatch.setattr(grp, "getgrgid", found)
    assert ("others can write" in who_else_writes(folder)) == others
    folder.chmod(0o777)
    assert "others can write" in who_else_writes(folder)
