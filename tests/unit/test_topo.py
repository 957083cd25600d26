"""The table of RDMA addresses: in guests that have some, and for every reason to have none."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from support.places import INSTALLED, TESTS

from pgasdl.config import VARIABLES, Config
from pgasdl.errors import UnavailableError
from pgasdl.tools import cli, doctor, probes, rdma

FIELDS = set(rdma.RdmaAddress.__dataclass_fields__)


class Native(types.ModuleType):
    """Answers in place of the native module."""

    def __init__(self, answer: list[rdma.RdmaAddress] | Exception, left_out: str = "") -> None:
        super().__init__("pgasdl._native")
        self._answer = answer
        self._left_out = left_out
        self.wishes: list[dict[str, object]] = []
        self.takes: int | None = 64  # bytes inline

    def cuda_missing(self) -> str:
        return "no driver"

    def tcp_place(self, interfaces: str) -> str:
        return {"": "10.0.0.1 (eth1)", "eth2": "10.1.0.1 (eth2)"}.get(interfaces, "")

    def transports(self) -> dict[str, str]:
        return {"shm": "", "verbs": self._left_out}

    def VerbsOptions(self, **settings: object) -> dict[str, object]:
        return settings

    def verbs_inline_bytes(self, options: dict[str, object]) -> int:
        if self.takes is None:
            raise UnavailableError("no connections")
        return self.takes

    def verbs_devices(self, options: dict[str, object]) -> list[rdma.RdmaAddress]:
        self.wishes.append(options)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


GOOD = rdma.RdmaAddress("mlx5_0", 1, 3, "active", "Ethernet", "RoCE v2", 4096, "::ffff:10.0.0.1",
                    "eth1", 0, chosen=True, path_mtu=1024, pkey=0x8001,
                        ack_timeout=17, keeps_order=True)  # fmt: skip
LOCAL = rdma.RdmaAddress("mlx5_0", 1, 0, "active", "Ethernet", "RoCE v1", 4096, "fe80::1", "eth1",
                     0, refused="it is RoCE v1, which is not routed")  # fmt: skip
DOWN = rdma.RdmaAddress("mlx5_1", 1, 0, "down", refused="the port is down")
OTHER = rdma.RdmaAddress("mlx5_1", 1, 0, refused="P_Key 0x8001 was asked for, and the port's")
CLOSED = rdma.RdmaAddress(
    "mlx5_1", refused="it cannot be opened: Permission denied; in a container"
)


def answer(
    monkeypatch: pytest.MonkeyPatch, given: list[rdma.RdmaAddress] | Exception, left_out: str = ""
) -> Native:
    native = Native(given, left_out)
    monkeypatch.setitem(sys.modules, "pgasdl._native", native)
    return native


@pytest.mark.parametrize(
    ("interface", "ports", "told"),
    [
        ("", "", "any free port of 10.0.0.1 (eth1)"),
        ("eth2", "20000-20063", "ports 20000 to 20063 of 10.1.0.1 (eth2)"),
        ("eth3", "", "no interface of PGASDL_TCP_INTERFACE=eth3 has an address"),
    ],
)
def test_what_joins_machines(
    interface: str, ports: str, told: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, value in (("INTERFACE", interface), ("PORTS", ports)):
        if value:
            monkeypatch.setenv(f"PGASDL_TCP_{name}", value)
    for given, words in (([GOOD], "verbs, if all have it; else the MPI"), ([], "the MPI")):
        answer(monkeypatch, given)
        assert cli.main(["topo"]) == 0
        line = f"between machines: {words} that started the ranks, or TCP: {told}"
        assert line in capsys.readouterr().out.splitlines()


def test_chosen_and_refused_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    native = answer(monkeypatch, [GOOD, LOCAL])
    monkeypatch.setenv("PGASDL_VERBS_DEVICE", "mlx5_0,mlx5_1:2")
    monkeypatch.setenv("PGASDL_VERBS_GID", "3")
    monkeypatch.setenv("PGASDL_VERBS_SL", "5")
    assert cli.main(["topo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("*  mlx5_0  1     3") and lines[1].endswith("chosen")
    assert lines[2].startswith("   mlx5_0  1     0") and lines[2].endswith(LOCAL.refused)
    (wish,) = native.wishes
    assert (wish["ports"], wish["gid"], wish["service_level"]) == (
        (("mlx5_0", 0), ("mlx5_1", 2)), 3, 5,
    )  # fmt: skip
    in_use = dict(line.split(maxsplit=1) for line in lines if line.startswith("PGASDL_VERBS_"))
    assert set(in_use) == {
        variable.name for variable in VARIABLES if variable.name.startswith("PGASDL_VERBS_")
    } - {"PGASDL_VERBS_DEVICE", "PGASDL_VERBS_GID"}
    assert in_use["PGASDL_VERBS_PKEY"] == "0x8001"
    assert in_use["PGASDL_VERBS_MTU"] == "1024"
    assert in_use["PGASDL_VERBS_SL"] == "5"
    assert in_use["PGASDL_VERBS_INLINE"] == "64"
    assert in_use["PGASDL_VERBS_ORDER"] == "kept"
    assert in_use["PGASDL_VERBS_RAILS"] == "1 (mlx5_0:1)"
    assert in_use["PGASDL_VERBS_STRIPE"] == str(1 << 20)
    assert in_use["PGASDL_VERBS_ACK_TIMEOUT"] == "17 (537 ms)"
    assert doctor._verbs("x").status == doctor._devices("x").status == "OK"


def test_an_infiniband_port_has_a_lid(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    native = answer(monkeypatch, [dataclasses.replace(GOOD, lid=4711, link_layer="InfiniBand")])
    native.takes = 32
    assert cli.main(["topo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines[0].index("LID")
    assert lines[1][at : at + 5] == "4711 "
    assert any(line.endswith("32 (64 were asked for)") for line in lines)
    native.takes = None  # as `pgasdl doctor` tells
    assert rdma.survey(Config.from_environment({})).inline_bytes == 0


@pytest.mark.parametrize(
    ("given", "wish", "fix"),
    [
        ([DOWN], {}, "ip link set"),
        ([DOWN], {"verbs_device": "mlx5_1:1"}, "ip link set"),
        ([CLOSED], {}, "--device=/dev/infiniband --ulimit memlock=-1"),
        ([DOWN], {"verbs_device": "mlx5_7"}, "unset PGASDL_VERBS_DEVICE"),
        ([DOWN], {"verbs_device": "^mlx5_1"}, "unset PGASDL_VERBS_DEVICE"),
        ([OTHER], {"verbs_pkey": 0x8001}, "PGASDL_VERBS_PKEY"),
    ],
)
def test_every_refusal_has_its_fix(
    monkeypatch: pytest.MonkeyPatch, given: list[rdma.RdmaAddress], wish: dict[str, Any], fix: str
) -> None:
    answer(monkeypatch, given)
    found = rdma.survey(Config.from_environment({}, **wish))
    assert (found.stage, found.chosen) == ("device", None)
    assert found.missing == f"mlx5_1: {given[0].refused}"
    assert fix in found.fix


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel with one device, of which no node is here."""
    (tmp_path / "infiniband" / "rxe0").mkdir(parents=True)
    monkeypatch.setattr(rdma, "SYSFS", tmp_path / "infiniband")
    monkeypatch.setattr(rdma, "NODES", tmp_path / "none")
    return tmp_path


def test_a_build_without_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, [], left_out="knows no verbs: a header was missing")
    found = rdma.survey(Config.from_environment({}))
    assert (found.addresses, found.stage) == ((), "build")
    assert "libibverbs-dev" in found.fix
    finding = doctor._verbs("x")
    assert finding.status == "WARN"
    assert finding.detail.startswith("native module; knows no verbs")


def test_no_libibverbs(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, UnavailableError("no RDMA here: libibverbs.so.1: cannot open"))
    monkeypatch.setattr(rdma, "LIBRARY", "libibverbs-not-there.so.1")
    found = rdma.survey(Config.from_environment({}))
    assert (found.addresses, found.stage) == ((), "library")
    assert found.fix == "apt-get install libibverbs1 ibverbs-providers rdma-core"
    assert doctor._verbs("x").detail.startswith("native module; built with it; no RDMA here")


def test_devices_that_are_not_passed_on_or_have_no_provider(
    kernel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, [])
    found = rdma.survey(Config.from_environment({}))
    assert found.stage == "device" and "rxe0" in found.missing
    assert found.fix.startswith("in docker --device=/dev/infiniband --ulimit memlock=-1")
    rdma.NODES.mkdir()
    (rdma.NODES / "uverbs0").touch()
    assert rdma.survey(Config.from_environment({})).fix == "apt-get install ibverbs-providers"


def test_none_at_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, [])
    monkeypatch.setattr(rdma, "SYSFS", tmp_path / "none")
    assert cli.main(["topo"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("no transport verbs: no RDMA device\nfix: an RDMA adapter, or soft-RoCE")
    assert "\n\nno GPU: no driver\n\nNUMA node 0: CPUs " in out
    assert cli.main(["topo", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["addresses"], report["fix"]) == ([], rdma.GET_ONE)
    assert (report["gpus"]["gpus"], report["gpus"]["missing"]) == ([], "no driver")


def test_wrong_wishes_are_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PGASDL_VERBS_MTU", "1500")
    assert cli.main(["topo"]) == cli.USAGE_ERROR
    assert "PGASDL_VERBS_MTU" in capsys.readouterr().err


def test_memlock(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = [8 << 20]
    monkeypatch.setattr(probes.resource, "getrlimit", lambda _: (limit[0], limit[0]))
    monkeypatch.setattr(probes, "_may_lock_all", lambda: False)
    monkeypatch.setattr(probes, "kernel_devices", list)
    assert probes.memlock("x").status == "OK"
    monkeypatch.setattr(probes, "kernel_devices", lambda: ["rxe0"])
    finding = probes.memlock("x")
    assert finding.status == "WARN"
    assert "pinned whole" in finding.detail
    assert "--ulimit memlock=-1" in finding.fix
    limit[0] = 1 << 30
    assert probes.memlock("x").status == "OK"


def guest(command: str, mode: str = "dummy", **variables: str) -> Any:
    """Run ``command`` in a guest with an RDMA device; {topo} and {doctor} in it print JSON."""
    sys.path.insert(0, str(TESTS / "softroce"))
    try:
        rig = importlib.import_module("rig")
    finally:
        sys.path.pop(0)
    rig.require()
    pgasdl = f"{sys.executable} -m pgasdl"
    line = command.format(topo=f"{pgasdl} topo --json", doctor=f"{pgasdl} doctor --json")
    env = {"PYTHONPATH": str(INSTALLED), **variables}
    return rig.run(line, mode=mode, env=env, directory="/", timeout=60)


@pytest.mark.full
def test_in_a_guest_the_routable_address_is_chosen() -> None:
    result = guest("{topo}; echo $SOFTROCE_GID_INDEX")
    text, _, index = result.check().output.rstrip().rpartition("\n")
    report = json.loads(text)
    chosen, *others = report["addresses"]
    assert set(chosen) == FIELDS
    assert report["stage"] == ""
    assert chosen["chosen"] and (chosen["device"], chosen["gid_index"]) == ("rxe0", int(index))
    assert (chosen["state"], chosen["type"], chosen["mtu"]) == ("active", "RoCE v2", 4096)
    assert chosen["gid"].startswith("::ffff:") and chosen["net_device"]
    assert others and all(not one["chosen"] and one["refused"] for one in others)
    assert report["settings"]["PGASDL_VERBS_ORDER"] == "kept"


@pytest.mark.full
def test_in_a_guest_another_device_can_be_asked_for() -> None:
    wishes = {"PGASDL_VERBS_DEVICE": "rxe1", "PGASDL_VERBS_ORDER": "completion"}
    report = json.loads(guest("{topo}", "veth", **wishes).check().output)
    assert report["settings"]["PGASDL_VERBS_ORDER"] == "completion"
    assert report["addresses"][0]["device"] == "rxe1" and report["addresses"][0]["chosen"]
    refused = {a["refused"] for a in report["addresses"] if a["device"] == "rxe0"}
    assert refused == {"device rxe1 was asked for"}


@pytest.mark.full
def test_in_a_guest_ranks_take_turns_at_devices_of_a_subnet() -> None:
    """On the cable of the first; those of another are not for them, unless as rails."""
    program = "with __import__('pgasdl').init() as ctx: ctx.barrier(); print(ctx.describe())"
    run = f"{sys.executable} -m pgasdl run -n 3 --no-prefix -c {shlex.quote(program)}"
    line = f"{{topo}}; {run}; PGASDL_VERBS_RAILS=2 {{topo}}"
    wishes = {"PGASDL_TRANSPORT": "verbs", "PGASDL_VERBS_INLINE": "4096", "PGASDL_LOG": "warning"}
    result = guest(line, "cables", **wishes).check().output
    first, end = json.JSONDecoder().raw_decode(result)
    told, _, rest = result[end:].partition("\n{")
    second = json.loads("{" + rest)
    assert first["settings"]["PGASDL_VERBS_INLINE"] == "512 (4096 were asked for)"
    (unknown,) = first["nodes"]
    assert (unknown["number"], unknown["own"]) == (-1, False)
    assert unknown["ports"] == {
        "rxe0:1": "ranks 0, 2 ...", "rxe1:1": "ranks 1, 3 ...", "rxe2:1": "", "rxe3:1": "",
    }  # fmt: skip
    why = {a["device"]: a["refused"] for a in first["addresses"] if a["gid"].startswith("::ffff")}
    assert why["rxe1"] == "it is another rank's turn"
    assert why["rxe2"] == why["rxe3"] == "it is in another subnet than rxe0"
    used = [line.split()[-1] for line in told.splitlines() if line.startswith("RDMA by ")]
    assert sorted(used) == ["rxe0:1", "rxe0:1", "rxe1:1"]
    assert second["settings"]["PGASDL_VERBS_RAILS"] == "2 (rxe0:1, rxe2:1)"


@pytest.mark.full
def test_in_a_guest_every_way_to_have_none_says_so() -> None:
    hide = "mv /dev/infiniband /dev/away"
    lines = [
        "PGASDL_VERBS_DEVICE=rxe7 {topo} >/tmp/1; echo $? >>/tmp/status",
        f"{hide}; {{topo}} >/tmp/2; echo $? >>/tmp/status; mv /dev/away /dev/infiniband",
        "ip link set inner0 down; {topo} >/tmp/3; echo $? >>/tmp/status",
        "{doctor} >/tmp/4; echo '['; for i in 1 2 3 4; do cat /tmp/$i; echo ,; done",
        "echo \\\"$(cat /tmp/status)\\\" | tr '\\n' ' '; echo ']'",
    ]
    asked, hidden, down, findings, status = json.loads(guest("\n".join(lines)).check().output)
    assert status.split() == ["0", "0", "0"]
    assert "device rxe7 was asked for" in asked["missing"] and "unset" in asked["fix"]
    assert "--device=/dev/infiniband" in hidden["fix"] and "rxe0" in hidden["missing"]
    assert down["missing"] == "rxe0: the port is down"
    verbs = next(finding for finding in findings if finding["name"] == "verbs transport")
    assert verbs["status"] == "WARN" and "libibverbs loads; rxe0" in verbs["detail"]


@pytest.mark.full
def test_in_a_guest_doctor_is_content() -> None:
    findings = {f["name"]: f for f in json.loads(guest("{doctor}").output)}
    assert findings["verbs transport"]["status"] == "OK", findings
    assert findings["RDMA devices"]["detail"].startswith("rxe0 port 1 GID")
