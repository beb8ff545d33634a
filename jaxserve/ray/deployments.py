"""The two deployments on Ray Serve: the gateway, and replicas with a server as their child."""

# pyright: reportUntypedClassDecorator=false

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from importlib import import_module
from typing import Any

from jaxserve.ray.call import Beginning, Call, Head, ReplicaLost
from jaxserve.ray.child import Child
from jaxserve.ray.first_start import first_start
from jaxserve.ray.fleet_metrics import merged
from jaxserve.ray.gateway import Gateway
from jaxserve.ray.scaling import RUNNING, WAITING, QueuePolicy
from jaxserve.ray.settings import Deployment, own_flags

# Ray is an optional package, so it has no types here.
serve: Any = import_module("ray.serve")
RayError: Any = import_module("ray.exceptions").RayError
RayTaskError: Any = import_module("ray.exceptions").RayTaskError
RayServeException: Any = import_module("ray.serve.exceptions").RayServeException

log = logging.getLogger("ray.serve")

ROUTER = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router"
    ":PrefixCacheAffinityRouter"
)
"""Ray 2.60's router by prefixes. Its public name, `ray.serve.llm.request_router`, imports vLLM."""

_TREE_CHARS = 2_000_000
"""Characters that the router remembers per replica: the prompts of half a million tokens."""
_PATIENCE_SECONDS = 5.0
REPLICA_HEADER = "x-jaxserve-replica"
"""Answer header with the name of the replica."""
_REPLICA, _GATEWAY = "jaxserve-replica", "jaxserve"


class Replica:
    """A replica: forwards requests to a server that is a child of this process."""

    async def __init__(self, flags: tuple[str, ...], *, on_cpu: bool):
        self._child = Child(flags, {"JAX_PLATFORMS": "cpu"} if on_cpu else None)
        self._name: str = serve.get_replica_context().replica_id.unique_id
        async with first_start(flags):
            await self._child.start()
        self._watching = asyncio.create_task(self._end_with_child())

    async def _end_with_child(self) -> None:
        """Ends this process when the server ends. Serve replaces such a replica at once. A replica
        that fails its health checks would get requests until three of them have failed."""
        failure = await self._child.ended()
        log.error("%s", failure)
        os._exit(1)

    async def exchange(
        self, begins: Beginning | None = None, *, call: Call
    ) -> AsyncGenerator[Head | bytes]:
        """Yields the server's answer. `begins` is for the router, which reads only positional
        arguments."""
        async for item in self._child.exchange(call):
            if isinstance(item, Head):
                item = item._replace(headers=(*item.headers, (REPLICA_HEADER, self._name)))
            yield item

    async def exchange_whole(self, call: Call) -> tuple[str, Head, bytes]:
        """Returns this replica's name and the server's answer."""
        items = [item async for item in self._child.exchange(call)]
        head = next(item for item in items if isinstance(item, Head))
        body = b"".join(item for item in items if not isinstance(item, Head))
        return self._name, head, body

    async def check_health(self) -> None:
        """Called by Serve: makes the server generate a token."""
        await self._child.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve: returns the numbers that QueuePolicy uses."""
        queue = await self._child.queue()
        return {RUNNING: queue.running, WAITING: queue.waiting}

    def __del__(self) -> None:
        """Called by Serve when the running requests have ended."""
        child: Child | None = getattr(self, "_child", None)
        watching: asyncio.Task[None] | None = getattr(self, "_watching", None)
        if watching is not None:
            watching.get_loop().call_soon_threadsafe(watching.cancel)
        if child is not None:
            child.stop(_PATIENCE_SECONDS)


@serve.ingress()
class Front:
    """The process of the gateway."""

    def __init__(self, replica: Any, *, max_request_bytes: int, shared: bool):
        self._replica = replica
        self._exchange = replica.options(stream=True).exchange
        self._gateway = Gateway(self._ask, max_request_bytes=max_request_bytes, shared=shared)

    def __serve_build_asgi_app__(self) -> Any:
        return self._gateway

    async def _ask(self, call: Call, begins: str) -> AsyncGenerator[Head | bytes]:
        if call.path.startswith("/metrics"):
            for item in await self._metrics(call):
                yield item
            return
        response = self._exchange.remote(*([Beginning(begins)] if begins else ()), call=call)
        try:
            async for item in response:
                yield item
        except (ReplicaLost, RayTaskError):  # raised by a replica
            raise
        except (RayError, RayServeException) as error:  # the replica is gone
            raise ReplicaLost(f"{type(error).__name__}: {error}") from error
        finally:
            response.cancel()

    async def _metrics(self, call: Call) -> tuple[Head, bytes]:
        """Returns the metrics of all replicas, or the error of one of them."""
        answers = await self._replica.broadcast("exchange_whole", call).results_async()
        if not answers:
            raise ReplicaLost("no replica is ready")
        refused = [answer for answer in answers if answer[1].status != 200]
        if refused:
            return refused[0][1:]
        kind = ("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        text = merged({name: body.decode() for name, _, body in answers})
        return Head(200, (kind,)), text.encode()


def application(deployment: Deployment) -> Any:
    """Returns the Serve application of a fleet."""
    fleet, options = deployment.fleet, deployment.options
    replica = serve.deployment(Replica).options(
        name=_REPLICA,
        ray_actor_options={"num_gpus": fleet.gpus, "num_cpus": fleet.cpus},
        max_ongoing_requests=deployment.most_ongoing,
        health_check_period_s=10,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=options.shutdown_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        **_routing(deployment),
        **_number(deployment),
    )
    front = serve.deployment(Front).options(
        name=_GATEWAY,
        num_replicas=fleet.gateways,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=deployment.most_ongoing * fleet.most_replicas,
        # Longer than for replicas, so that the gateway can report errors of their streams.
        graceful_shutdown_timeout_s=options.shutdown_timeout + _PATIENCE_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
    )
    return front.bind(
        replica.bind(own_flags(fleet.flags), on_cpu=fleet.gpus == 0),
        max_request_bytes=options.max_request_bytes,
        shared=fleet.most_replicas > 1,
    )


def _routing(deployment: Deployment) -> dict[str, Any]:
    if not deployment.fleet.affinity:
        return {}
    settings = {
        "imbalanced_threshold": deployment.fleet.affinity_imbalance,
        "do_eviction": True,
        "eviction_threshold_chars": _TREE_CHARS,
        "eviction_target_chars": _TREE_CHARS * 9 // 10,
    }
    config = serve.config.RequestRouterConfig(
        request_router_class=ROUTER, request_router_kwargs=settings
    )
    return {"request_router_config": config}


def _number(deployment: Deployment) -> dict[str, Any]:
    fleet = deployment.fleet
    if fleet.max_replicas is None:
        return {"num_replicas": fleet.replicas}
    policy = serve.config.AutoscalingPolicy(
        policy_function=QueuePolicy,
        policy_kwargs={
            "target_requests": fleet.target_requests,
            "target_waiting": fleet.target_waiting,
        },
    )
    config = serve.config.AutoscalingConfig(
        min_replicas=fleet.replicas,
        max_replicas=fleet.max_replicas,
        policy=policy,
        upscale_delay_s=30,
        downscale_delay_s=600,  # a replica's cached prefixes are lost with it
        look_back_period_s=30,
    )
    return {"autoscaling_config": config}
