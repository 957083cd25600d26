"""Where ranks of other machines find this one over TCP. Needs the standard library only."""

from __future__ import annotations

from pgasdl import _load_native
from pgasdl.config import Config


def tcp(config: Config) -> tuple[str, str]:
    """Return the ports and addresses of transport tcp, and what is wrong with them, or ""."""
    try:
        addresses = _load_native().tcp_place(config.tcp_interface or "")
    except ImportError:
        return "", "the native module cannot be imported"
    first, last = config.tcp_ports or (0, 0)
    ports = f"ports {first} to {last}" if last else "any free port"
    if addresses:
        return f"{ports} of {addresses}", ""
    if config.tcp_interface:
        return "", f"no interface of PGASDL_TCP_INTERFACE={config.tcp_interface} has an address"
    return "", "this machine has only a loopback address: others cannot connect"
