"""The table of variables is strict and complete, and arguments come before variables."""

import dataclasses
import json
import os

import pytest

from pgasdl.config import VARIABLES, Config, format_value, listing
from pgasdl.errors import ConfigError
from pgasdl.settings.parsers import Ports


def test_defaults_are_accepted_values() -> None:
    config = Config.from_environment({})
    for variable in VARIABLES:
        if variable.default is not None:
            assert variable.parse(format_value(variable.default)) == variable.default
        assert getattr(config, variable.field) == variable.default
        assert variable.doc and variable.parser.accepted


def test_mailboxes_take_no_more_with_more_ranks() -> None:
    """64 KiB each for up to 128 ranks, then 16 MiB for all."""
    config = Config.from_environment({})
    longest = {size: config.limits(size).passive_bytes for size in (1, 128, 129, 1024, 16384)}
    assert longest == {1: 65536, 128: 65536, 129: 65024, 1024: 8192, 16384: 512}
    given = Config.from_environment({"PGASDL_PASSIVE_BYTES": "70000"})
    assert given.limits(1024).passive_bytes == 70000


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("PGASDL_RANK", "0", 0),
        ("PGASDL_TIMEOUT", "2.5", 2.5),
        ("PGASDL_TIMEOUT", "1e3", 1000.0),
        ("PGASDL_TIMEOUT", ".5", 0.5),
        ("PGASDL_STORE", "127.0.0.1:80", ("127.0.0.1", 80)),
        ("PGASDL_STORE", "[::1]:65535", ("::1", 65535)),
        ("PGASDL_STORE", "node-7.cluster:4000", ("node-7.cluster", 4000)),
        ("PGASDL_TRANSPORT", "shm", "shm"),
        ("PGASDL_VERBS_DEVICE", "mlx5_0", Ports((("mlx5_0", 0),))),
        ("PGASDL_VERBS_DEVICE", "mlx5_0:1,mlx5_1", Ports((("mlx5_0", 1), ("mlx5_1", 0)))),
        ("PGASDL_VERBS_DEVICE", "^mlx5_0:255", Ports((("mlx5_0", 255),), excluded=True)),
        ("PGASDL_VERBS_PKEY", "0x8001", 0x8001),
        ("PGASDL_VERBS_PKEY", "32769", 0x8001),
        ("PGASDL_VERBS_PKEY", "0xfFfF", 0xFFFF),
        ("PGASDL_VERBS_MTU", "1024", 1024),
        ("PGASDL_VERBS_SL", "15", 15),
        ("PGASDL_VERBS_RAILS", "8", 8),
        ("PGASDL_VERBS_STRIPE", "4096", 4096),
        ("PGASDL_SECRET_FILE", "/home/a b/secret", "/home/a b/secret"),
    ],
)
def test_accepted(name: str, text: str, value: object) -> None:
    field = name.removeprefix("PGASDL_").lower()
    assert getattr(Config.from_environment({name: text}), field) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *[
            ("PGASDL_RANK", t)
            for t in ("", " 1", "1 ", "-1", "+1", "1.0", "0x1", "1_0", "one", "٣")
        ],
        ("PGASDL_RANK", "9" * 50),
        ("PGASDL_SIZE", "0"),
        *[("PGASDL_TIMEOUT", t) for t in ("0", "-1", "nan", "inf", "1e99", "5s", "", ".", "1,5")],
        *[
            ("PGASDL_STORE", t)
            for t in ("host", "host:", ":80", "host:0", "host:65536", "::1:80", "a b:1", "h:1\n")
        ],
        ("PGASDL_TRANSPORT", "SHM"),
        ("PGASDL_PROGRESS", "threads"),
        ("PGASDL_JOB_ID", "a/b"),
        ("PGASDL_JOB_ID", "x" * 129),
        ("PGASDL_SECRET_FD", "2"),
        *[
            ("PGASDL_VERBS_DEVICE", t)
            for t in (
                "",
                "^",
                ",",
                "a,",
                "a:",
                "a:0",
                "a:256",
                "a:1:2",
                "a b",
                "a,^b",
                "a/b",
                "^^a",
            )
        ],
        ("PGASDL_VERBS_DEVICE", "a," * 300 + "a"),
        *[
            ("PGASDL_VERBS_PKEY", t)
            for t in ("0", "0x0", "0x8000", "0x10000", "65536", "8001h", "x")
        ],
        *[("PGASDL_VERBS_MTU", t) for t in ("0", "1500", "8192", "-256", "1024 ", "0x400")],
        ("PGASDL_VERBS_SL", "16"),
        ("PGASDL_VERBS_TC", "256"),
        ("PGASDL_VERBS_GRH", "never"),
        ("PGASDL_VERBS_RETRY_COUNT", "8"),
        ("PGASDL_VERBS_RNR_RETRY_COUNT", "-1"),
        ("PGASDL_VERBS_ACK_TIMEOUT", "0"),
        ("PGASDL_VERBS_ACK_TIMEOUT", "32"),
        ("PGASDL_VERBS_INLINE", "15"),
        ("PGASDL_VERBS_ORDER", "strict"),
        *[("PGASDL_VERBS_RAILS", t) for t in ("0", "9", "all")],
        ("PGASDL_VERBS_STRIPE", "4095"),
        ("PGASDL_TRACE", ""),
    ],
)
def test_refused_with_name_value_and_what_is_accepted(name: str, text: str) -> None:
    variable = next(v for v in VARIABLES if v.name == name)
    with pytest.raises(ConfigError) as caught:
        Config.from_environment({name: text})
    assert name in str(caught.value)
    assert variable.parser.accepted in str(caught.value)


@pytest.mark.parametrize(("heartbeat", "limit"), [(200, 0.5), (501, 1.5), (60_000, 3.0)])
def test_stop_detection_that_would_be_off_is_refused(heartbeat: int, limit: float) -> None:
    """In variables, in arguments, and in ``replace``."""
    environ = {"PGASDL_HEARTBEAT_MS": str(heartbeat), "PGASDL_STOPPED_AFTER": str(limit)}
    with pytest.raises(ConfigError, match="3 heartbeats have to fit in"):
        Config.from_environment(environ)
    with pytest.raises(ConfigError, match="PGASDL_HEARTBEAT_MS"):
        Config.from_environment({}, heartbeat_ms=heartbeat, stopped_after=limit)
    config = Config.from_environment({}, heartbeat_ms=10, stopped_after=limit)
    with pytest.raises(ConfigError, match="never be noticed"):
        config.replace(heartbeat_ms=heartbeat)


def test_unknown_variable_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"PGASDL_TIMOUT.*PGASDL_TIMEOUT"):
        Config.from_environment({"PGASDL_TIMOUT": "1"})
    with pytest.raises(ConfigError, match="unknown variable PGASDL_:"):
        Config.from_environment({"PGASDL_": "1"})


def test_arguments_come_first_and_none_is_not_given() -> None:
    environ = {"PGASDL_TIMEOUT": "5", "PGASDL_QUEUES": "3"}
    config = Config.from_environment(environ, timeout=7, queues=None)
    assert (config.timeout, config.queues) == (7.0, 3)


@pytest.mark.parametrize(
    "arguments",
    [
        {"timeout": "7"},
        {"timeout": True},
        {"timeout": float("nan")},
        {"rank": -1, "size": 2},
        {"rank": 1.0, "size": 2},
        {"transport": "ethernet"},
        {"store": ("host", "80")},
        {"timeot": 1},
        {"verbs_mtu": "1024"},
        {"verbs_pkey": "0x8001"},
        {"verbs_device": ("mlx5_0", 1)},
    ],
)
def test_refused_arguments(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_environment({}, **arguments)
    assert next(iter(arguments)) in str(caught.value)


def test_an_explicit_place_drops_the_launcher_s() -> None:
    environ = {
        "PGASDL_RANK": "3",
        "PGASDL_SIZE": "4",
        "PGASDL_LOCAL_RANK": "3",
        "PGASDL_LOCAL_SIZE": "4",
    }
    config = Config.from_environment(environ, rank=0, size=1)
    assert (config.rank, config.size, config.local_rank, config.local_size) == (0, 1, None, None)


def test_bad_variable_is_an_error_even_where_an_argument_overrides_it() -> None:
    with pytest.raises(ConfigError, match="PGASDL_TIMEOUT"):
        Config.from_environment({"PGASDL_TIMEOUT": "x"}, timeout=1)


def test_other_variables_are_not_ours() -> None:
    Config.from_environment({"PGASD": "x", "MY_PGASDL_X": "y", "pgasdl_rank": "z"})


def test_replace_is_checked() -> None:
    config = Config.from_environment({})
    assert config.replace(timeout=1).timeout == 1.0
    with pytest.raises(ConfigError):
        config.replace(timeout=-1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.timeout = 1  # type: ignore[misc]


def test_listing_shows_all_and_collects_every_problem() -> None:
    rows, problems = listing({"PGASDL_RANK": "x", "PGASDL_TIMEOUT": "5", "PGASDL_NO": "1"})
    assert [row[0] for row in rows] == [v.name for v in VARIABLES]
    assert ("PGASDL_TIMEOUT", "5") in [row[:2] for row in rows]
    assert len(problems) == 2 and "PGASDL_RANK" in problems[0] and "PGASDL_NO" in problems[1]


def test_listing_tells_of_values_that_exclude_each_other() -> None:
    _, problems = listing({"PGASDL_HEARTBEAT_MS": "29500"})
    assert len(problems) == 1 and "PGASDL_STOPPED_AFTER=3: " in problems[0]
    _, problems = listing({"PGASDL_HEARTBEAT_MS": "29500", "PGASDL_STOPPED_AFTER": "x"})
    assert len(problems) == 1 and "PGASDL_STOPPED_AFTER='x'" in problems[0]
    assert listing({"PGASDL_HEARTBEAT_MS": "29500", "PGASDL_STOPPED_AFTER": "90"})[1] == []


def test_env_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from pgasdl.tools.cli import main

    for name in [name for name in os.environ if name.startswith("PGASDL_")]:
        monkeypatch.delenv(name)
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert all(variable.name in text for variable in VARIABLES)
    monkeypatch.setenv("PGASDL_WRONG", "1")
    assert main(["env", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert len(report["variables"]) == len(VARIABLES) and len(report["problems"]) == 1


def test_ports_are_those_named_or_all_others() -> None:
    some = Config.from_environment({}, verbs_device="mlx5_0:1,mlx5_1").verbs_device
    others = Config.from_environment({"PGASDL_VERBS_DEVICE": "^mlx5_0:1,mlx5_1"}).verbs_device
    assert some is not None and others is not None
    assert (str(some), str(others)) == ("mlx5_0:1,mlx5_1", "^mlx5_0:1,mlx5_1")
    for device, port, named in (
        ("mlx5_0", 1, True), ("mlx5_0", 2, False), ("mlx5_1", 2, True), ("mlx5_10", 1, False),
    ):  # fmt: skip
        assert (some.allows(device, port), others.allows(device, port)) == (named, not named)
    assert Config.from_environment({}, verbs_device=others).verbs_device == others
