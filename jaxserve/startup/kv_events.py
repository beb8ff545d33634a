"""Opens the publisher of KV cache events, if the flags ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxserve.cli.options import Options
from jaxserve.config import ConfigError
from jaxserve.metrics.metrics import Metrics

if TYPE_CHECKING:
    from jaxserve.kv_events.publisher import ZmqPublisher


def open_publisher(options: Options, metrics: Metrics) -> ZmqPublisher | None:
    """Returns a publisher that listens; None if the flags do not ask for one.

    Raises:
      ConfigError: ZMQ is not installed, an address cannot be used, or prefix caching is off.
    """
    config = options.kv_events_config
    if config is None or not config.active:
        return None
    if not options.enable_prefix_caching:
        raise ConfigError("--kv-events-config: without --enable-prefix-caching nothing is cached")
    try:
        from jaxserve.kv_events.publisher import ZmqPublisher  # needs an optional package
    except ImportError as error:
        raise ConfigError(
            f"--kv-events-config needs ZMQ ({error.name} is missing): install the extra kv-events, "
            "as in pip install 'jaxserve[kv-events]'"
        ) from None
    return ZmqPublisher(config, metrics)
