"""How the server listens: flags, files and environment to the configuration of the HTTP side."""

from __future__ import annotations

import errno
import ipaddress
import logging
import ssl
from pathlib import Path

from aiohttp import web

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
        allowed_origins=tuple(options.allowed_origins or ()),
        log_requests=options.enable_log_requests,
        max_request_bytes=options.max_request_bytes,
        max_queued_tokens=options.max_num_queued_tokens,
        request_timeout=options.request_timeout,
        stall_timeout=options.stall_timeout,
        keep_alive_interval=options.keep_alive_interval,
    )


def tls_context(options: Options) -> ssl.SSLContext | None:
    """None: plain HTTP. Raises ConfigError for files that do not make a server's identity."""
    key, certificate, clients = options.ssl_keyfile, options.ssl_certfile, options.ssl_ca_certs
    if key is None and certificate is None and clients is None:
        return None
    if key is None or certificate is None:
        raise ConfigError("HTTPS needs both --ssl-keyfile and --ssl-certfile")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # An empty password: a key that is encrypted is an error and not a question.
        context.load_cert_chain(certificate, key, password="")
        if clients is not None:
            context.load_verify_locations(clients)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(str(file) for file in (key, certificate, clients) if file is not None)
        raise ConfigError(f"cannot serve HTTPS with {files}: {error}") from None
    return context


async def bind(
    runner: web.AppRunner, config: ServerConfig, tls: ssl.SSLContext | None = None
) -> str:
    """Listen before anything slow happens: a port in use is known at once. Returns the URL."""
    try:
        await web.TCPSite(runner, config.host, config.port, ssl_context=tls).start()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {config.port} on {config.host} is in use; choose another with --port"
            ) from None
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error}") from None
    host, port = runner.addresses[0][:2]
    scheme = "http" if tls is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


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
