"""The rig itself: guests boot, have verbs devices, return results, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import kernel
import pytest
import rig

pytestmark = pytest.mark.full

HERE = Path(__file__).resolve().parent
GUEST = [sys.executable, str(HERE / "guest.py")]

PINGPONG = "ibv_rc_pingpong -d {device} -g $SOFTROCE_GID_INDEX -n 200 -c {server}"


def kernels(mark: Path) -> list[int]:
    """The kernels whose control folder lies in ``mark``: others may run guests meanwhile.

    A process that a kernel has just forked has the kernel's command line too.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        number = int(entry.name)
        with contextlib.suppress(OSError):
            line = entry.joinpath("cmdline").read_bytes()
            if b"softroce=%s/" % bytes(mark) in line and os.getsid(number) == number:
                found.append(number)
    return found


def processes_of(kernel_process: int) -> list[int]:
    """All processes of a guest: its kernel leads a session, which they share."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(entry.name)) == kernel_process:
                found.append(int(entry.name))
    return found


@pytest.fixture(autouse=True)
def control(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Where this test's guests have their control folders; afterwards nothing may be left."""
    folder = tmp_path_factory.mktemp("control")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    assert not kernels(folder)
    assert not list(folder.iterdir())


def test_status_and_output() -> None:
    result = rig.run("echo out; echo error >&2; printf end; exit 3")
    assert (result.status, result.output) == (3, "out\nerror\nend")
    assert not result.timed_out


def test_vector_environment_and_directory(tmp_path: Path) -> None:
    code = "import os; print([os.environ['WORD'], os.getcwd(), os.getuid()])"
    result = rig.run(
        [sys.executable, "-c", code], env={"WORD": "two  words 'n $more"}, directory=tmp_path
    )
    assert result.check().output == f"{['two  words ' + chr(39) + 'n $more', str(tmp_path), 0]}\n"


def test_output_is_whole_and_unchanged() -> None:
    result = rig.run("seq 200000", timeout=60)
    assert result.check().output == "".join(f"{i}\n" for i in range(1, 200001))


def test_writes_stay_inside_but_where_asked(tmp_path: Path) -> None:
    inside, real = tmp_path / "inside", tmp_path / "real"
    inside.mkdir()
    real.mkdir()
    (inside / "old").write_text("old")
    command = f"cat {inside}/old; echo new > {inside}/old; echo new > {real}/new; touch /root-file"
    result = rig.run(command, writable=[real])
    assert result.check().output == "old"
    assert (inside / "old").read_text() == "old"
    assert (real / "new").read_text() == "new\n"
    assert not Path("/root-file").exists()


@pytest.mark.parametrize(
    ("mode", "n_devices"), [("dummy", 1), ("rails", 2), ("veth", 2), ("cables", 4)]
)
def test_devices(mode: str, n_devices: int) -> None:
    result = rig.run("ibv_devinfo; echo $SOFTROCE_DEVICE $SOFTROCE_GID_INDEX", mode=mode).check()
    assert re.findall(r"hca_id:\s*(\w+)", result.output) == [f"rxe{i}" for i in range(n_devices)]
    assert result.output.count("PORT_ACTIVE") == n_devices
    assert result.output.count("active_mtu:\t\t4096") == n_devices
    assert re.search(r"^rxe0 \d+$", result.output, re.MULTILINE)


def test_siw_device() -> None:
    output = rig.run("ibv_devinfo", driver="siw").check().output
    assert "siw0" in output
    assert "iWARP" in output


def test_pingpong_in_one_guest() -> None:
    server = PINGPONG.format(device="rxe0", server="")
    client = PINGPONG.format(device="rxe0", server="$SOFTROCE_ADDRESS")
    result = rig.run(f"{server} & sleep 1; {client} && wait $!").check()
    assert result.output.count("200 iters in") == 2


def test_write_bandwidth_in_one_guest() -> None:
    perf = "ib_write_bw -d rxe0 -x $SOFTROCE_GID_INDEX -s 65536 -n 200 -F"
    result = rig.run(f"{perf} >/tmp/server & sleep 1; {perf} $SOFTROCE_ADDRESS && wait $!").check()
    assert re.search(r"^ *65536 +200 ", result.output, re.MULTILINE)


def counter(name: str, device: str = "rxe0") -> str:
    return f"echo {name} $(cat /sys/class/infiniband/{device}/ports/1/hw_counters/{name})"


def test_packets_travel_between_two_devices_and_are_lost() -> None:
    """There are so many packets that some loss is almost certain."""
    server = PINGPONG.format(device="rxe1", server="")
    client = PINGPONG.format(device="rxe0", server="$SOFTROCE_ADDRESS")
    # A side that misses the last acknowledgement waits for an ended peer: wait for neither side.
    command = f"{server} & sleep 1; timeout 60 {client}; kill $!; tc -s qdisc show dev veth0"
    result = rig.run(command, mode="veth", loss=5)
    dropped = re.search(r"Sent \d+ bytes (\d+) pkt \(dropped (\d+)", result.output)
    assert dropped, result.output
    assert int(dropped[1]) > 100
    assert int(dropped[2]) > 0


@pytest.mark.parametrize("loss", [0, 2])
def test_two_guests(loss: float) -> None:
    """Like two hosts: the rendezvous by TCP and the data by RDMA use the same cable."""
    server = "timeout 60 " + PINGPONG.format(device="rxe0", server="")
    client = "sleep 1; timeout 60 " + PINGPONG.format(device="rxe0", server="guest1")
    results = rig.run_pair(
        (f"{server}; {counter('sent_pkts')}", f"{client}; tc -s qdisc show dev vec0"), loss=loss
    )
    done = ["200 iters in" in result.check().output for result in results]
    # With loss, a side that misses the last acknowledgement asks for it in vain: the other ended.
    assert any(done) if loss else all(done), [result.output for result in results]
    dropped = re.search(r"netem.*loss.*\n.*\(dropped (\d+)", results[1].output)
    assert bool(dropped) == bool(loss)
    if dropped:
        assert int(dropped[1]) > 0


def test_two_guests_each_give_their_own_status() -> None:
    first, second = rig.run_pair(("hostname; exit 4", "hostname; exit 5"))
    assert (first.status, first.output) == (4, "guest1\n")
    assert (second.status, second.output) == (5, "guest2\n")


def test_a_host_may_vanish() -> None:
    first, second = rig.run_pair(("sleep 3; echo alive", "echo going; sync; busybox poweroff -f"))
    assert first.check().output == "alive\n"
    assert second.status == rig.VANISHED
    assert second.output == "going\n"


def test_out_of_time() -> None:
    began = time.monotonic()
    result = rig.run("echo begun; while :; do :; done", timeout=5)
    assert (result.status, result.output, result.timed_out) == (rig.TIMED_OUT, "begun\n", True)
    assert time.monotonic() - began < 10
    with pytest.raises(AssertionError, match="out of time"):
        result.check()


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing can be lost"):
        rig.run("true", loss=1)
    with pytest.raises(ValueError, match="one of dummy, rails, veth, cables"):
        rig.run("true", mode="cable")
    with pytest.raises(ValueError, match="is not a folder"):
        rig.run("true", writable=[tmp_path / "none"])


def test_lost_options_are_named() -> None:
    wanted = "# text\nCONFIG_A=y\nCONFIG_B=y\nCONFIG_C=2\n"
    assert kernel.lost_options(wanted, "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=22\n") == [
        "CONFIG_B=y",
        "CONFIG_C=2",
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_launcher_ends_the_guest(number: int, control: Path) -> None:
    command = [*GUEST, "--", "echo begun; while :; do /bin/true; done"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher,
        contextlib.ExitStack() as at_end,
    ):
        at_end.callback(launcher.terminate)
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "begun\n"
        (kernel_process,) = kernels(control)
        assert len(processes_of(kernel_process)) > 1
        launcher.send_signal(number)
        launcher.wait(10)
    deadline = time.monotonic() + 5
    while processes_of(kernel_process) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_of(kernel_process)
    assert launcher.returncode == (-number if number == signal.SIGKILL else 128 + number)


def test_command_line_of_a_pair() -> None:
    command = [*GUEST, "--pair", "-e", "WORD=x", "--", "echo a$WORD; printf b", "echo c; exit 7"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 7, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[1] ax", "[1] b", "[2] c"]


def test_guests_side_by_side() -> None:
    """Started by threads: guests of one process share nothing."""
    outputs: dict[int, str] = {}

    def one(i: int) -> None:
        outputs[i] = rig.run(["echo", str(i)]).check().output

    threads = [threading.Thread(target=one, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {i: f"{i}\n" for i in range(3)}


def test_missing_names_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "run python tests/softroce/kernel.py" in "".join(rig.missing())
    for ci, outcome in (("", pytest.skip.Exception), ("true", pytest.fail.Exception)):
        monkeypatch.setenv("CI", ci)
        with pytest.raises(outcome, match="kernel not built"):
            rig.require()
