"""The counters of a rank in the text format of OpenMetrics 1.0."""

from __future__ import annotations

from collections.abc import Iterable

from pgasdl.counters import Counters, Traffic

Sample = tuple[dict[str, object], float]  # labels besides the rank's, and the value


def exposition(counters: Counters, rank: int) -> str:
    """Return the counters of ``rank`` as text; see :meth:`Context.openmetrics`."""
    peers = [(peer, each) for peer, each in enumerate(counters.peers) if each != Traffic()]
    waits, layers = counters.waits.items(), counters.layers.items()
    return "".join((
        _family("traffic_bytes", "Bytes moved to and from the memory of peers.", rank, (
            ({"peer": peer, "direction": way}, value)
            for peer, each in peers
            for way, value in (("write", each.bytes_written), ("read", each.bytes_read))
        )),
        _family("traffic_messages", "Messages that moved them, and atomics.", rank, (
            ({"peer": peer, "direction": way}, value)
            for peer, each in peers
            for way, value in (("write", each.messages_written), ("read", each.messages_read))
        )),
        _family("notifications", "Notifications raised at peers.", rank, (
            ({"peer": peer}, each.notifications) for peer, each in peers
        )),
        _family("registrations", "Registrations of memory with the transport.", rank, [
            ({}, counters.registrations)
        ]),
        _family("waits", "Waits that were not over at once.", rank, (
            ({"cause": cause}, each.number) for cause, each in waits
        )),
        _family("wait_seconds", "Time in these waits.", rank, (
            ({"cause": cause}, each.seconds) for cause, each in waits
        )),
        _family("peers_lost", "Peers whose loss was noticed.", rank, [({}, counters.losses)]),
        _family("layer_exchanges", "Exchanges of a layer's gradient.", rank, (
            ({"exchange": exchange, "layer": layer}, each.exchanges)
            for (exchange, layer), each in layers
        )),
        _family("layer_seconds", "Time of a layer's gradient, by what it was spent on.", rank, (
            ({"exchange": exchange, "layer": layer, "state": state}, getattr(each, state))
            for (exchange, layer), each in layers
            for state in ("queued", "exchanging", "waiting")
        )),
        "# EOF\n",
    ))  # fmt: skip


def _family(name: str, text: str, rank: int, samples: Iterable[Sample]) -> str:
    full, unit = f"pgasdl_{name}", name.rpartition("_")[2]
    lines = [f"# TYPE {full} counter"]
    if unit in ("bytes", "seconds"):
        lines.append(f"# UNIT {full} {unit}")
    lines.append(f"# HELP {full} {text}")
    for labels, value in samples:
        told = ",".join(f'{key}="{word}"' for key, word in {"rank": rank, **labels}.items())
        lines.append(f"{full}_total{{{told}}} {value}")
    return "\n".join(lines) + "\n"
