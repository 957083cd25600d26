"""Words that ranks exchange about themselves at init."""

from __future__ import annotations

from dataclasses import fields

from pgasdl.errors import MismatchError
from pgasdl.runtime.routes import RankInfo


def one(data: bytes) -> None:
    """Words stay the same when encoded and decoded; others are a MismatchError."""
    try:
        info = RankInfo.decoded(data)
    except MismatchError:
        return
    for field in fields(info):
        assert type(getattr(info, field.name)).__name__ == str(field.type).partition("[")[0]
    assert RankInfo.decoded(info.encoded()) == info
