"""``pgasdl topo``: ways between machines, the settings of transport verbs, GPUs, NUMA nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from pgasdl.config import Config
from pgasdl.tools import gpus, network, nodes
from pgasdl.tools.rdma import RdmaAddress, Survey, survey
from pgasdl.tools.text import aligned, write_json

_HEADINGS = (
    "", "DEVICE", "PORT", "GID", "STATE", "LINK", "TYPE", "GBIT/S", "MTU", "LID", "ADDRESS",
    "NET", "NUMA",
)  # fmt: skip


def main(as_json: bool = False) -> None:
    """Print the table. Raises ConfigError."""
    config = Config.from_environment()
    found = survey(config)
    in_use = settings(config, found)
    gpus_found = gpus.survey()
    by_node = nodes.survey(found.addresses, gpus_found.gpus)
    place, wrong = network.tcp(config)
    if as_json:
        more = {
            "settings": in_use,
            "tcp": place or wrong,
            "gpus": asdict(gpus_found),
            "nodes": [*map(asdict, by_node)],
        }
        write_json(asdict(found) | more)
    else:
        over_tcp = f"{_between(found)}: {place or wrong}"
        lines = [
            *_report(found, in_use),
            "",
            over_tcp,
            "",
            *gpus.report(gpus_found),
            "",
            *nodes.report(by_node),
        ]
        print("\n".join(lines).rstrip())


def settings(config: Config, found: Survey) -> dict[str, str]:
    """Return how transport verbs connects: variables, and the values in effect."""
    chosen = found.chosen
    if chosen is None:
        return {}
    microseconds = 4.096 * 2**chosen.ack_timeout
    return {
        "PGASDL_VERBS_PKEY": f"0x{chosen.pkey:04x}",
        "PGASDL_VERBS_MTU": str(chosen.path_mtu),
        "PGASDL_VERBS_SL": str(config.verbs_sl),
        "PGASDL_VERBS_TC": str(config.verbs_tc),
        "PGASDL_VERBS_GRH": config.verbs_grh,
        "PGASDL_VERBS_RETRY_COUNT": str(config.verbs_retry_count),
        "PGASDL_VERBS_RNR_RETRY_COUNT": str(config.verbs_rnr_retry_count),
        "PGASDL_VERBS_ACK_TIMEOUT": f"{chosen.ack_timeout} ({microseconds / 1e3:.3g} ms)",
        "PGASDL_VERBS_INLINE": _inline(config, found),
        "PGASDL_VERBS_ORDER": "kept" if chosen.keeps_order else "completion",
        "PGASDL_VERBS_RAILS": _rails(config, found),
        "PGASDL_VERBS_STRIPE": str(config.verbs_stripe),
    }


def _between(found: Survey) -> str:
    if found.chosen:
        return (
            "between machines: verbs, if all have it; else the MPI that started the ranks, or TCP"
        )
    return "between machines: the MPI that started the ranks, or TCP"


def _inline(config: Config, found: Survey) -> str:
    if found.inline_bytes in (0, config.verbs_inline):
        return str(config.verbs_inline)
    return f"{found.inline_bytes} ({config.verbs_inline} were asked for)"


def _rails(config: Config, found: Survey) -> str:
    ports = [f"{each.device}:{each.port}" for each in found.addresses if each.chosen]
    if len(ports) == config.verbs_rails:
        return f"{len(ports)} ({', '.join(ports)})"
    return f"{len(ports)} of {config.verbs_rails} ({', '.join(ports)}); no other port can be used"


def _report(found: Survey, in_use: dict[str, str]) -> Iterator[str]:
    if found.addresses:
        yield from aligned([(*_HEADINGS, ""), *map(_cells, found.addresses)])
        yield ""
    if found.chosen:
        yield "* for the first rank here; PGASDL_VERBS_DEVICE and PGASDL_VERBS_GID choose another"
        yield ""
        yield "its settings, which `pgasdl env` explains:"
        yield from aligned([*in_use.items()])
        return
    yield f"no transport verbs: {found.missing}"
    yield f"fix: {found.fix}"


def _cells(address: RdmaAddress) -> tuple[str, ...]:
    return (
        "*" if address.chosen else "",
        address.device,
        str(address.port or "-"),
        "-" if address.gid_index < 0 else str(address.gid_index),
        address.state or "-",
        address.link_layer or "-",
        address.type or "-",
        f"{address.gigabits:g}" if address.gigabits else "-",
        str(address.mtu or "-"),
        str(address.lid or "-"),
        address.gid or "-",
        address.net_device or "-",
        "-" if address.numa_node < 0 else str(address.numa_node),
        "chosen" if address.chosen else address.refused,
    )
