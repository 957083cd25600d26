"""Counters of ranks in the text format of OpenMetrics 1.0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pgasdl.counters import Counters, Traffic

Labels = dict[str, object]
Sample = tuple[Labels, float]  # labels, and the value

MEDIA_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
END = "# EOF\n"


def exposition(counters: Counters, rank: int) -> str:
    """Return the counters of ``rank`` as text; see :meth:`Context.openmetrics`."""
    return counted([({"rank": rank}, counters)]) + END


def counted(ranks: Sequence[tuple[Labels, Counters]]) -> str:
    """Return the families of counters of ranks, each with the labels of its rank."""
    peers = [
        (labels | {"peer": peer}, each)
        for labels, counters in ranks
        for peer, each in enumerate(counters.peers)
        if each != Traffic()
    ]
    waits = [
        (labels | {"cause": cause}, each)
        for labels, counters in ranks
        for cause, each in counters.waits.items()
    ]
    layers = [
        (labels | {"exchange": exchange, "layer": layer}, each)
        for labels, counters in ranks
        for (exchange, layer), each in counters.layers.items()
    ]
    return "".join((
        _counter("traffic_bytes", "Bytes moved to and from the memory of peers.", (
            (labels | {"direction": way}, value)
            for labels, each in peers
            for way, value in (("write", each.bytes_written), ("read", each.bytes_read))
        )),
        _counter("traffic_messages", "Messages that moved them, and atomics.", (
            (labels | {"direction": way}, value)
            for labels, each in peers
            for way, value in (("write", each.messages_written), ("read", each.messages_read))
        )),
        _counter("notifications", "Notifications raised at peers.", (
            (labels, each.notifications) for labels, each in peers
        )),
        _counter("registrations", "Registrations of memory with the transport.", (
            (labels, counters.registrations) for labels, counters in ranks
        )),
        _counter("waits", "Waits that were not over at once.", (
            (labels, each.number) for labels, each in waits
        )),
        _counter("wait_seconds", "Time in these waits.", (
            (labels, each.seconds) for labels, each in waits
        )),
        _counter("peers_lost", "Peers whose loss was noticed.", (
            (labels, counters.losses) for labels, counters in ranks
        )),
        _counter("layer_exchanges", "Exchanges of a layer's gradient.", (
            (labels, each.exchanges) for labels, each in layers
        )),
        _counter("layer_seconds", "Time of a layer's gradient, by what it was spent on.", (
            (labels | {"state": state}, getattr(each, state))
            for labels, each in layers
            for state in ("computing", "queued", "exchanging", "waiting")
        )),
    ))  # fmt: skip


def gauge(name: str, text: str, samples: Iterable[Sample]) -> str:
    """Return a family of values that rise and fall."""
    return _family("gauge", f"pgasdl_{name}", text, samples, "")


def _counter(name: str, text: str, samples: Iterable[Sample]) -> str:
    return _family("counter", f"pgasdl_{name}", text, samples, "_total")


def _family(kind: str, name: str, text: str, samples: Iterable[Sample], suffix: str) -> str:
    lines = [f"# TYPE {name} {kind}"]
    unit = name.rpartition("_")[2]
    if unit in ("bytes", "seconds"):
        lines.append(f"# UNIT {name} {unit}")
    lines.append(f"# HELP {name} {text}")
    for labels, value in samples:
        told = ",".join(f'{key}="{word}"' for key, word in labels.items())
        lines.append(f"{name}{suffix}{{{told}}} {value}")
    return "\n".join(lines) + "\n"
