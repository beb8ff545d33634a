"""`python -m jaxserve.ray`: serves a model with several replicas until a signal arrives."""

from __future__ import annotations

import signal
import sys
import threading
import time
from importlib import import_module
from typing import Any

from jaxserve.config import ConfigError
from jaxserve.ray import missing
from jaxserve.ray.settings import Deployment, Listen, parse

_NAME = "jaxserve"
_MARGIN_SECONDS = 30.0


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns the exit status. Errors are one line on stderr."""
    try:
        deployment, listen = parse(sys.argv[1:] if argv is None else argv)
        _serve(deployment, listen)
    except ConfigError as error:
        print(f"jaxserve.ray: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the fleet was ready
        return 128 + signal.SIGINT
    return 0


def _serve(deployment: Deployment, listen: Listen) -> None:
    """Deploys the application and waits for a signal. A cluster that this process started ends with
    it. On another cluster, the application is deleted.

    Raises:
      ConfigError: Ray Serve is missing, or no replica started.
    """
    try:
        ray: Any = import_module("ray")
        from jaxserve.ray.deployments import application, serve
    except ModuleNotFoundError as error:
        raise missing(error) from None
    ray.init(address=listen.address, include_dashboard=None if listen.address else False)
    try:
        serve.start(
            http_options=serve.config.HTTPOptions(
                host=listen.host,
                port=listen.port,
                ssl_keyfile=listen.ssl_keyfile and str(listen.ssl_keyfile),
                ssl_certfile=listen.ssl_certfile and str(listen.ssl_certfile),
            )
        )
        try:
            serve.run(application(deployment), name=_NAME)
        except RuntimeError as error:
            raise ConfigError(f"no replica started: {error}") from None
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):  # only now, because Ray sets its own SIGTERM
            signal.signal(number, lambda *_: stop.set())
        scheme = "https" if listen.ssl_certfile else "http"
        print(
            f"\njaxserve on Ray Serve is ready: {deployment.fleet.replicas} replicas at "
            f"{scheme}://{listen.host}:{listen.port}/v1\n",
            flush=True,
        )
        stop.wait()
        _drain(serve, deployment.options.shutdown_timeout)
    finally:
        ray.shutdown()


def _drain(serve: Any, timeout: float) -> None:
    """Deletes the application. Its streams have `timeout` seconds to finish. Ray waits at most a
    minute at a time."""
    deadline = time.monotonic() + timeout + _MARGIN_SECONDS
    while True:
        try:
            serve.delete(_NAME)
            return
        except TimeoutError as error:
            if time.monotonic() > deadline:
                print(f"jaxserve.ray: {error}", file=sys.stderr)
                return


if __name__ == "__main__":
    sys.exit(main())
