"""How the server listens: flags, files and environment to the configuration of the HTTP side."""

from __future__ import annotations

import ipaddress
import logging
from pathlib import Path

from jaxserve.cli import Options
from jaxserve.config import ConfigError, ServerConfig
from jaxserve.environment import API_KEY, api_key_of_environment
from jaxserve.model_source import ModelSource
from jaxserve.server.access import digest

log = logging.getLogger(__name__)


def server_config(options: Options, source: ModelSource) -> ServerConfig:
    """Raises ConfigError for keys that cannot be read or would let everybody in."""
    keys = api_keys(options)
    if not keys and not is_loopback(options.host):
        log.warning("no --api-key: whoever reaches %s:%d may use it", options.host, options.port)
    return ServerConfig(
        model_names=source.names,
        host=options.host,
        port=options.port,
        sampling_defaults=source.sampling_defaults,
        api_key_digests=tuple(digest(key) for key in keys),
        open_metrics=options.open_metrics,
    )


def api_keys(options: Options) -> list[str]:
    """Of the flags, the file and the environment, together."""
    keys = list(options.api_key or ())
    if options.api_key_file is not None:
        keys += keys_of_file(options.api_key_file)
    if (key := api_key_of_environment()) is not None:
        keys.append(key)
    for key in keys:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"an API key (--api-key, --api-key-file, {API_KEY}) is empty or has characters "
                "that headers do not carry: printable ASCII without spaces is allowed"
            )
    return list(dict.fromkeys(keys))


def keys_of_file(path: Path) -> list[str]:
    """One key per line; blank lines and those that begin with # are left out."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path}: cannot be read: {error}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {path}: holds no key; without keys leave the flag out")
    return keys


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
