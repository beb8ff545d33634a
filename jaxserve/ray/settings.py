"""Settings of a deployment: from a command line, or from the `args` of a Serve config file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jaxserve.cli.config_file import flags_of
from jaxserve.cli.flag_parser import FlagParser
from jaxserve.cli.flag_values import from_0, port, positive
from jaxserve.cli.flags import AddArgument
from jaxserve.cli.foreign_flags import translated
from jaxserve.cli.options import FLAGS_VARIABLE, Options, parse_args
from jaxserve.config import ConfigError

MOST_SEQUENCES = 256
"""Sequences that a replica runs at once, at most, if no flag says it."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Replicas of one model, their resources, and how requests find them."""

    replicas: int = 1
    max_replicas: int | None = None
    """If set, the fleet scales with the queues between `replicas` and this number."""
    gpus: float = 1.0
    """GPUs per replica; 0: it runs on the CPU."""
    cpus: float = 1.0
    gateways: int = 1
    affinity: bool = True
    """Send requests to the replica that got requests with the same beginning."""
    affinity_imbalance: int = 32
    """If a replica has this many more requests than the least loaded one, load decides instead."""
    target_requests: float = 64.0
    """Target of running plus waiting requests per replica."""
    target_waiting: float = 4.0
    """Target of waiting requests per replica."""
    flags: tuple[str, ...] = ()
    """The command line of each replica's server."""

    def __post_init__(self) -> None:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError("--max-replicas is less than --replicas")
        if self.replicas < 1 or self.gateways < 1:
            raise ConfigError("--replicas and --gateways are at least 1")
        if min(self.target_requests, self.target_waiting) <= 0:
            raise ConfigError("--target-requests and --target-waiting are more than 0")

    @property
    def most_replicas(self) -> int:
        return self.max_replicas or self.replicas


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A fleet, and the options of its flags."""

    fleet: Fleet
    options: Options

    @property
    def most_ongoing(self) -> int:
        """Requests that a replica accepts before its own queue refuses them."""
        return (self.options.max_num_seqs or MOST_SEQUENCES) + self.options.max_num_queued_reqs


@dataclass(frozen=True, kw_only=True)
class Listen:
    """Where Serve's proxy listens, and which cluster it belongs to."""

    host: str
    port: int
    ssl_keyfile: Path | None
    ssl_certfile: Path | None
    address: str | None
    """Address of a running cluster; None: start one on this machine."""


def parse(argv: list[str]) -> tuple[Deployment, Listen]:
    """Parses a command line of `python -m jaxserve.ray`.

    Flags that are not the fleet's go to each replica. Wrong flags end the process with a message.

    Raises:
      ConfigError: flags exclude each other, or are not allowed for a replica.
    """
    given, rest = _parser().parse_known_args(argv)
    values = vars(given)
    listen = Listen(**{field.name: values.pop(field.name) for field in fields(Listen)})
    return deployment({**values, "flags": tuple(rest)}), listen


def from_settings(settings: Mapping[str, Any]) -> Deployment:
    """Parses the `args` of a Serve config file: fields of Fleet, and flags of serving with
    underscores, such as `max_model_len: 32768`.

    Raises:
      ConfigError: see `parse`.
    """
    ours = {field.name for field in fields(Fleet)} - {"flags"}
    fleet = {key: value for key, value in settings.items() if key in ours}
    flags = {key: value for key, value in settings.items() if key not in ours}
    return deployment({**fleet, "flags": tuple(flags_of(flags))})


def deployment(fleet: Mapping[str, Any]) -> Deployment:
    """Returns the deployment for these fields of Fleet, with checked flags.

    Raises:
      ConfigError: a field or a flag is not allowed for a fleet.
    """
    try:
        flags, _ = translated(list(fleet["flags"]))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    options = parse_args(flags, defaults=os.environ.get(FLAGS_VARIABLE, ""))
    for name, why in _REFUSED.items():
        if getattr(options, name):
            raise ConfigError(f"--{name.replace('_', '-')}: {why}")
    values: dict[str, Any] = {**fleet, "flags": tuple(flags)}
    return Deployment(fleet=Fleet(**values), options=options)


_ONE_REPLICA = "its routes act on one replica; restart the application instead"
_REFUSED = {
    "uds": "each replica has a socket of its own",
    "probe_port": "replicas of a machine would all want this port",
    "kv_events_config": "replicas of a machine would all want its addresses; no router reads it",
    "root_path": "set route_prefix in a Serve config file",
    "admin_api_key": _ONE_REPLICA,
    "admin_api_key_file": _ONE_REPLICA,
    "ssl_keyfile": "certificates belong to Serve's HTTP options",
    "ssl_certfile": "certificates belong to Serve's HTTP options",
    "ssl_ca_certs": "Serve's proxy does not ask for client certificates",
}
"""Options that a replica cannot have, and the reasons."""


def _parser() -> FlagParser:
    parser = FlagParser(
        prog="python -m jaxserve.ray",
        description="Serve a model by several replicas on Ray Serve.",
        epilog="All other flags are those of each replica: see python -m jaxserve --help.",
        usage="python -m jaxserve.ray [flags] [flags of serving]",
    )
    _add_fleet_flags(parser.add_argument_group("fleet").add_argument)
    _add_listen_flags(parser.add_argument_group("cluster and proxy").add_argument)
    return parser


def _add_fleet_flags(add: AddArgument) -> None:
    add("--replicas", type=positive, default=Fleet.replicas, help="servers, one per GPU")
    add(
        "--max-replicas",
        type=positive,
        help="as many replicas as the queues need, from --replicas to this many (default: "
        "--replicas always)",
    )
    add("--gpus", type=from_0, default=Fleet.gpus, help="GPUs of a replica; 0: on the CPU")
    add("--cpus", type=from_0, default=Fleet.cpus, help="CPUs of a replica; may be a fraction")
    add("--gateways", type=positive, default=Fleet.gateways, help="processes that route requests")
    add(
        "--affinity",
        action=argparse.BooleanOptionalAction,
        default=Fleet.affinity,
        help="send requests where requests with the same beginning went; without it to the less "
        "loaded of two replicas",
    )
    add(
        "--affinity-imbalance",
        type=positive,
        default=Fleet.affinity_imbalance,
        help="requests more than the emptiest replica has, from which on load decides",
    )
    add(
        "--target-requests",
        type=from_0,
        default=Fleet.target_requests,
        help="running and waiting requests that a replica should have, with --max-replicas",
    )
    add(
        "--target-waiting",
        type=from_0,
        default=Fleet.target_waiting,
        help="waiting requests that a replica may have, with --max-replicas",
    )


def _add_listen_flags(add: AddArgument) -> None:
    add("--host", default="127.0.0.1", help="address of the proxy on each node")
    add("--port", type=port, default=8000, help="port of the proxy on each node")
    add("--ssl-keyfile", type=Path, help="private key of the proxy, PEM (default: none)")
    add("--ssl-certfile", type=Path, help="certificate with its chain, PEM (default: none)")
    add(
        "--address",
        help="a running cluster, such as auto or ray://HOST:10001 (default: one of this machine, "
        "which ends with this process)",
    )


def own_flags(flags: Sequence[str]) -> tuple[str, ...]:
    """Returns a replica's flags. The web pages are off unless a flag asks for them: through the
    gateway, each request of the engine's page could reach a different replica."""
    return ("--no-ui", *flags)
