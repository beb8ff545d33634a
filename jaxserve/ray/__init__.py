"""Serves one model with several replicas on Ray Serve. Start it with `python -m jaxserve.ray`, or
with the import path `jaxserve.ray:build_app` in a Serve config file. Needs the extra `ray`."""

from __future__ import annotations

from typing import Any

from jaxserve.config import ConfigError


def build_app(args: dict[str, Any]) -> Any:
    """Returns the Serve application for the `args` of a Serve config file.

    Args:
      args: fields of `jaxserve.ray.settings.Fleet` (replicas, gpus, …), and flags of serving with
        underscores (model, max_model_len, …).

    Raises:
      ConfigError: an argument is not allowed for a fleet, or Ray Serve is missing.
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
