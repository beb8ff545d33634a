"""Configures the HTTP server from flags, files and the environment, and opens its socket."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import ipaddress
import logging
import os
import ssl
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from jaxserve.cli.options import Options
from jaxserve.config import ConfigError, ServerConfig
from jaxserve.server.access import digest
from jaxserve.setting_files import read_text
from jaxserve.startup.environment import (
    ADMIN_API_KEY,
    API_KEY,
    REASONING_KEY,
    VLLM_API_KEY,
    key_of_environment,
)
from jaxserve.tokenizer.chat_template import ChatTemplate
from jaxserve.weights.model_source import ModelSource

log = logging.getLogger(__name__)

_TURN_SECONDS = 5.0
MIN_REASONING_KEY = 32
"""The shortest reasoning key, in characters."""


def server_config(options: Options, source: ModelSource) -> ServerConfig:
    """Returns the HTTP server's configuration.

    Raises:
      ConfigError: a key or the chat template cannot be read, or a key is not valid.
    """
    keys = api_keys(options)
    if not keys and options.uds is None and not is_loopback(options.host):
        log.warning(
            "no API key is configured: anyone who can reach %s:%d can use the server",
            options.host,
            options.port,
        )
    return ServerConfig(
        model_names=source.names,
        host=options.host,
        port=options.port,
        uds=options.uds,
        root_path=options.root_path or "",
        ui=options.ui,
        header_timeout=options.header_timeout,
        write_timeout=options.write_timeout,
        force_include_usage=options.enable_force_include_usage,
        sampling_defaults=source.sampling_defaults,
        chat_template=_chat_template(options.chat_template),
        template_variables=options.default_chat_template_kwargs or {},
        reasoning_field=options.reasoning_field,
        architecture=source.spec.architecture,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        by_priority=options.scheduling_policy == "priority",
        isolate_cache_by_key=options.isolate_cache_by_key,
        api_key_digests=tuple(digest(key) for key in keys),
        admin_key_digests=tuple(digest(key) for key in admin_api_keys(options)),
        open_metrics=options.open_metrics,
        open_render=options.open_render,
        trust_gateway=options.trust_gateway,
        objectives=dict(options.inference_objectives or ()),
        allowed_origins=tuple(options.allowed_origins or ()),
        log_requests=options.enable_log_requests,
        max_request_bytes=options.max_request_bytes,
        response_store_bytes=options.response_store_bytes,
        reasoning_keys=tuple(reasoning_keys(options)),
        max_queued_tokens=options.max_num_queued_tokens,
        request_timeout=options.request_timeout,
        max_queue_time=options.max_queue_time,
        stall_timeout=options.stall_timeout,
        health_means=options.health_means,
        keep_alive_interval=options.keep_alive_interval,
    )


def _chat_template(path: Path | None) -> str | None:
    if path is None:
        return None
    source = read_text(path, "--chat-template")
    try:
        ChatTemplate(source)
    except ConfigError as error:
        raise ConfigError(f"--chat-template {path}: {error}") from None
    return source


async def bind(
    runner: web.AppRunner, config: ServerConfig, tls: ssl.SSLContext | None = None
) -> str:
    """Listens before anything slow happens, so that a port in use is reported at once. Returns the
    URL.

    Raises:
      ConfigError: the address is in use, or the server cannot listen on it.
    """
    scheme = "http" if tls is None else "https"
    if config.uds is not None:
        await _bind_unix(runner, config.uds, tls)
        return f"{scheme}://localhost"
    await listen(runner, config.host, config.port, "--port", tls)
    host, port = runner.addresses[0][:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


async def listen(
    runner: web.AppRunner, host: str, port: int, flag: str, tls: ssl.SSLContext | None = None
) -> None:
    """Listens on a TCP port. `flag`: the flag that chooses it, for errors.

    Raises:
      ConfigError: the address is in use, or the server cannot listen on it.
    """
    try:
        await web.TCPSite(runner, host, port, ssl_context=tls).start()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; choose another with {flag}"
            ) from None
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from None
    except UnicodeError:
        raise ConfigError(f"--host {host} is not a valid host name") from None


async def _bind_unix(runner: web.AppRunner, path: Path, tls: ssl.SSLContext | None) -> None:
    """Listens on a Unix socket. Replaces a stale socket, on which nobody answers."""
    try:
        async with _turn(path.parent):
            if await _answered(path):
                raise ConfigError(f"--uds {path}: another process listens there")
            await web.UnixSite(runner, path, ssl_context=tls).start()
    except OSError as error:
        raise ConfigError(f"--uds {path}: cannot listen: {error}") from None


async def _answered(path: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    writer.close()
    return True


@asynccontextmanager
async def _turn(folder: Path) -> AsyncGenerator[None]:
    """Holds the folder's lock. Without it, two servers that start together could both find a stale
    socket, and the second would replace the first one's. Raises OSError if another process holds
    the lock for seconds."""
    locked = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + _TURN_SECONDS
        while True:
            try:
                fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.01)
        yield
    finally:
        os.close(locked)


def api_keys(options: Options) -> list[str]:
    """Returns all API keys from flags, file and environment."""
    return _keys(
        options.api_key,
        ("--api-key", "--api-key-file"),
        options.api_key_file,
        API_KEY,
        VLLM_API_KEY,
    )


def admin_api_keys(options: Options) -> list[str]:
    """Returns all admin keys from flags, file and environment."""
    flags, file = ("--admin-api-key", "--admin-api-key-file"), options.admin_api_key_file
    return _keys(options.admin_api_key, flags, file, ADMIN_API_KEY)


def reasoning_keys(options: Options) -> list[str]:
    """Returns the reasoning keys from file and environment. Raises ConfigError if one is too short
    to be secret."""
    file = options.reasoning_key_file
    keys = _keys(None, ("--reasoning-key-file",), file, REASONING_KEY)
    for key in keys:
        if len(key) < MIN_REASONING_KEY:
            raise ConfigError(
                f"a reasoning key (--reasoning-key-file, {REASONING_KEY}) has {len(key)} "
                f"characters; at least {MIN_REASONING_KEY} random ones are needed, such as those "
                "of `openssl rand -hex 32`"
            )
    return keys


def _keys(
    given: list[str] | None, flags: Sequence[str], file: Path | None, *variables: str
) -> list[str]:
    """Returns keys from all sources. `flags`: the flags of the keys, for errors; the last one names
    the file."""
    keys = list(given or ())
    if file is not None:
        keys += _keys_of_file(flags[-1], file)
    found = map(key_of_environment, variables)
    keys += [key for key in found if key is not None]
    for key in keys:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"a key ({', '.join((*flags, *variables))}) is empty or has characters that HTTP "
                "headers cannot hold; use printable ASCII without spaces"
            )
    return list(dict.fromkeys(keys))


def _keys_of_file(flag: str, path: Path) -> list[str]:
    """Returns the keys in a file, one per line, without blank lines and lines that begin with #."""
    lines = [line.strip() for line in read_text(path, flag).splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{flag} {path}: holds no key; without keys leave the flag out")
    return keys


def is_loopback(host: str) -> bool:
    """Returns whether only processes of this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
