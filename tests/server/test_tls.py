"""HTTPS, client certificates, files that make no identity, and certificates that are renewed."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from jaxserve.cli.options import Options, parse_args
from jaxserve.config import ConfigError
from jaxserve.startup.tls import reload_when_changed, tls_context
from tests.fakes import FakeEngine
from tests.server.conftest import serving


class Identity(NamedTuple):
    key: str
    certificate: str

    @property
    def flags(self) -> list[str]:
        return ["--ssl-keyfile", self.key, "--ssl-certfile", self.certificate]


def make_identity(folder: Path, name: str) -> Identity:
    """Key and self-signed certificate of localhost."""
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("openssl makes the certificate")
    made = Identity(str(folder / f"{name}.key"), str(folder / f"{name}.pem"))
    subprocess.run(
        f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 "
        f"-subj /CN={name} -addext subjectAltName=IP:127.0.0.1 "
        f"-keyout {made.key} -out {made.certificate}".split(),
        check=True,
        capture_output=True,
    )
    return made


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return make_identity(tmp_path_factory.mktemp("tls"), "first")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return make_identity(tmp_path_factory.mktemp("tls"), "second")


@pytest.fixture
async def renewed(identity: Identity, tmp_path: Path) -> AsyncIterator[tuple[Identity, str]]:
    """Files that a server looks at again and again, and its URL; they begin as `identity`."""
    files = Identity(str(tmp_path / "key.pem"), str(tmp_path / "cert.pem"))
    shutil.copy(identity.key, files.key)
    shutil.copy(identity.certificate, files.certificate)
    options = options_of(*files.flags)
    context = tls_context(options)
    assert context is not None
    reloading = asyncio.ensure_future(reload_when_changed(context, options, every=0.02))
    async with serving(FakeEngine(), tls=context) as url:
        yield files, url
    assert not reloading.done()
    reloading.cancel()


async def until_served(url: str, identity: Identity) -> None:
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            assert await health(url, identity.certificate) == 200
            return
        await asyncio.sleep(0.02)


def options_of(*flags: str) -> Options:
    return parse_args(list(flags))


async def health(url: str, trusted: str) -> int:
    """Over a connection of its own."""
    trusting = ssl.create_default_context(cafile=trusted)
    async with aiohttp.request("GET", f"{url}/health", ssl=trusting) as reply:
        return reply.status


async def test_https(identity: Identity) -> None:
    async with serving(FakeEngine(), tls=tls_context(options_of(*identity.flags))) as url:
        assert url.startswith("https://")
        assert await health(url, identity.certificate) == 200
        with pytest.raises(aiohttp.ClientError):
            async with aiohttp.request("GET", url.replace("https", "http") + "/health"):
                pass


async def test_clients_without_a_certificate_are_turned_away(identity: Identity) -> None:
    flags = (*identity.flags, "--ssl-ca-certs", identity.certificate)
    trusting = ssl.create_default_context(cafile=identity.certificate)
    async with serving(FakeEngine(), tls=tls_context(options_of(*flags))) as url:
        with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
            async with aiohttp.request("GET", f"{url}/health", ssl=trusting):
                pass
        trusting.load_cert_chain(identity.certificate, identity.key)
        async with aiohttp.request("GET", f"{url}/health", ssl=trusting) as reply:
            assert reply.status == 200


async def test_a_renewed_certificate_is_served_without_a_restart(
    identity: Identity,
    other: Identity,
    renewed: tuple[Identity, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    files, url = renewed
    async with asyncio.timeout(10):
        shutil.copy(other.certificate, files.certificate)  # and not yet its key
        while "the old one stays" not in caplog.text:
            await asyncio.sleep(0.02)
        assert await health(url, identity.certificate) == 200
        shutil.copy(other.key, files.key)
        await until_served(url, other)
        with pytest.raises(aiohttp.ClientError):
            await health(url, identity.certificate)
    assert caplog.text.count("the old one stays") == 1


async def test_a_renewed_key_that_cannot_be_read_yet_is_read_later(
    identity: Identity,
    other: Identity,
    renewed: tuple[Identity, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As one that is written by root and then given to the server's user."""
    files, url = renewed
    async with asyncio.timeout(10):
        assert await health(url, identity.certificate) == 200
        Path(files.key).unlink()
        Path(files.key).symlink_to("/proc/self/mem")  # root cannot read it either
        shutil.copy(other.certificate, files.certificate)
        while "key.pem: cannot be read" not in caplog.text:
            await asyncio.sleep(0.02)
        Path(files.key).unlink()
        shutil.copy(other.key, files.key)
        await until_served(url, other)


def test_files_that_make_no_identity_are_named_with_what_is_wrong(
    identity: Identity, other: Identity, tmp_path: Path
) -> None:
    key, certificate = identity
    encrypted, missing = str(tmp_path / "encrypted.key"), str(tmp_path / "none.pem")
    subprocess.run(
        f"openssl pkey -in {key} -aes256 -passout pass:secret -out {encrypted}".split(), check=True
    )
    broken = tmp_path / "broken.pem"
    broken.write_text(Path(certificate).read_text()[:200])
    for flags, message in (
        (["--ssl-keyfile", key], "both"),
        (["--ssl-ca-certs", certificate], "both"),
        (Identity(missing, certificate).flags, "--ssl-keyfile .*none.pem: cannot be read: No such"),
        (Identity(key, missing).flags, "--ssl-certfile .*none.pem: cannot be read: No such file"),
        (Identity(str(tmp_path), certificate).flags, "cannot be read: Is a directory"),
        (Identity(certificate, certificate).flags, "--ssl-keyfile .* holds no private key"),
        (Identity(key, key).flags, "--ssl-certfile .* holds no certificate"),
        (Identity(encrypted, certificate).flags, "is encrypted"),
        (Identity(other.key, certificate).flags, "is not the key of the first certificate"),
        (Identity(key, str(broken)).flags, "cannot serve HTTPS with"),
        ([*identity.flags, "--ssl-ca-certs", key], "--ssl-ca-certs .* holds no certificate"),
    ):
        with pytest.raises(ConfigError, match=message):
            tls_context(options_of(*flags))
