"""Replicas of one model on Ray Serve: `python -m jaxserve.ray`, or `jaxserve.ray:build_app` as the
import path of a Serve config file. Needs the extra `ray`."""

from __future__ import annotations

from typing import Any

from jaxserve.config import ConfigError


def build_app(args: dict[str, Any]) -> Any:
    """Returns the Serve application that the `args` of a Serve config file describe.

    Args:
      args: fields of `jaxserve.ray.settings.Fleet` (replicas, gpus, …), and flags of serving with
        underscores (model, max_model_len, …).

    Raises:
      ConfigError: an argument that a fleet cannot have, or Ray Serve is missing.
    """
    from jaxserve.ray.settings import from_settings

    deployment = from_settings(args)
    try:
        from jaxserve.ray.deployments import application
    except ModuleNotFoundError as error:
        raise missing(error) from None
    return application(deployment)


def missing(error: ModuleNotFoundError) -> ConfigError:
    """Returns the error of an installation without Ray Serve."""
    return ConfigError(
        f"jaxserve.ray needs Ray Serve ({error.name} is missing): install the extra ray, as in "
        "pip install 'jaxserve[ray]'"
    )
