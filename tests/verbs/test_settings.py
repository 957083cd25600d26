"""Settings of a fabric, from the variables to what travels between two hosts."""

from __future__ import annotations

from pathlib import Path

import hosts
import pytest
from hosts import Job

pytestmark = pytest.mark.full

UNUSUAL = {
    "PGASDL_VERBS_DEVICE": "^nonesuch:1",
    "PGASDL_VERBS_PKEY": "0x7fff",
    "PGASDL_VERBS_SL": "3",
    "PGASDL_VERBS_TC": "104",
    "PGASDL_VERBS_GRH": "always",
    "PGASDL_VERBS_RETRY_COUNT": "5",
    "PGASDL_VERBS_RNR_RETRY_COUNT": "4",
    "PGASDL_VERBS_ACK_TIMEOUT": "18",
}
DIFFERENT = [
    "PGASDL_VERBS_MTU=512/1024",
    "PGASDL_VERBS_INLINE=4096/16",
    "PGASDL_VERBS_ORDER=kept/completion",
]


def test_settings_reach_the_hosts(tmp_path: Path) -> None:
    """Nothing at its default is exact; what no port of a rank can do ends all ranks, by name."""
    one_each = [[0], [1]]
    stories = hosts.run(
        tmp_path,
        [
            Job("unusual", "verbs/programs/settings.py", one_each, ["0/1", *DIFFERENT], UNUSUAL),
            Job(
                "refused", "verbs/programs/settings.py", one_each,
                ["0/1", "PGASDL_VERBS_PKEY=0x8001/0xffff"], {"PGASDL_TRANSPORT": "verbs"},
            ),
        ],
    )  # fmt: skip
    assert stories["unusual"].check(2).of(0)[-1] == "complete"
    assert stories["refused"].statuses() == {0: 1, 1: 1}
    for rank in range(2):
        last = stories["refused"].of(rank)[-1]
        assert last.startswith("pgasdl.errors.UnavailableError: "), str(stories["refused"])
        assert "rank 0" in last and "P_Key 0x8001 was asked for" in last
        assert "the port's table has 0xffff" in last
