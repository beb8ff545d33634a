"""HTTPS: loads the server's certificate from files, and reloads it after changes."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from jaxserve.cli.options import Options
from jaxserve.config import ConfigError

log = logging.getLogger(__name__)

CHECK_SECONDS = 10.0
"""Seconds between checks of the files."""


def tls_context(options: Options) -> ssl.SSLContext | None:
    """Returns the TLS context; None for plain HTTP. Raises ConfigError if the files are not a valid
    identity."""
    if not (files := _files(options)):
        return None
    if options.ssl_keyfile is None or options.ssl_certfile is None:
        raise ConfigError("HTTPS needs both --ssl-keyfile and --ssl-certfile")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _load(context, files)
    if options.ssl_ca_certs is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


async def reload_when_changed(
    context: ssl.SSLContext, options: Options, *, every: float = CHECK_SECONDS
) -> None:
    """Reloads the certificate when its files change, until cancelled. Later connections use the new
    one.

    Files that do not match, for instance during a replacement, change nothing. New authorities of
    `--ssl-ca-certs` are added. Removed authorities stay trusted until a restart.
    """
    files = _files(options)
    loaded, refused = _state(files), None
    while True:
        await asyncio.sleep(every)
        state = _state(files)
        if state in (loaded, refused):
            continue
        try:
            _load(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), files)
            _load(context, files)
        except ConfigError as error:
            log.error("the new certificate cannot be used, the old one stays: %s", error)
            refused = state
        else:
            log.info("reloaded the certificate")
            loaded = state


def _files(options: Options) -> dict[str, Path]:
    """Returns the files by flag."""
    files = {
        "--ssl-keyfile": options.ssl_keyfile,
        "--ssl-certfile": options.ssl_certfile,
        "--ssl-ca-certs": options.ssl_ca_certs,
    }
    return {flag: file for flag, file in files.items() if file is not None}


def _state(files: dict[str, Path]) -> list[bytes | None]:
    """Returns the contents of the files; None for a file that cannot be read now. Modification
    times do not work, because Kubernetes links the files into folders."""
    return [_content(file) for file in files.values()]


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes() if file.is_file() else None
    except OSError:
        return None


def _load(context: ssl.SSLContext, files: dict[str, Path]) -> None:
    """Loads the files. Raises ConfigError that names the wrong file."""
    contents = {flag: _read(flag, file) for flag, file in files.items()}
    key, certificate = files["--ssl-keyfile"], files["--ssl-certfile"]
    if b"ENCRYPTED" in contents["--ssl-keyfile"]:
        raise ConfigError(
            f"--ssl-keyfile {key} is encrypted, and the server cannot ask for its password: write "
            "it without one (openssl pkey -in KEY -out NEW), readable by the server only"
        )
    if b"PRIVATE KEY" not in contents["--ssl-keyfile"]:
        raise ConfigError(f"--ssl-keyfile {key} holds no private key in PEM")
    for flag in ("--ssl-certfile", "--ssl-ca-certs"):
        if flag in files and b"BEGIN CERTIFICATE" not in contents[flag]:
            raise ConfigError(f"{flag} {files[flag]} holds no certificate in PEM")
    try:
        context.load_cert_chain(certificate, key, password="")
        if "--ssl-ca-certs" in files:
            context.load_verify_locations(files["--ssl-ca-certs"])
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"--ssl-keyfile {key} is not the key of the first certificate in {certificate}"
            ) from None
        named = ", ".join(map(str, files.values()))
        raise ConfigError(f"cannot serve HTTPS with {named}: {error.reason or error}") from None


def _read(flag: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {file}: cannot be read: {error.strerror}") from None
