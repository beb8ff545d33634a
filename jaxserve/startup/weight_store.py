"""Replaces the served weights. Loads others with the programs of the start, without compilation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxserve.api import WeightChange, WeightsRefused
from jaxserve.cli.options import Options
from jaxserve.config import ConfigError
from jaxserve.models import decoder
from jaxserve.programs.executable_cache import Executable
from jaxserve.runner.runner import Runner, check_same
from jaxserve.startup import memory
from jaxserve.startup.engine_plan import EnginePlan
from jaxserve.weights.fp8_copy import with_copies
from jaxserve.weights.loading import WeightPlan, plan_weights, weight_loader
from jaxserve.weights.model_source import ModelSource, find_weights
from jaxserve_checkpoints.dummy import dummy_params
from jaxserve_checkpoints.load import load_leaves
from jaxserve_checkpoints.quantized import QuantizedCheckpoint
from jaxserve_checkpoints.reader import CheckpointError

log = logging.getLogger(__name__)


class RunnerWeights:
    """Implements `engine.loop.WeightStore` for a runner."""

    def __init__(
        self,
        options: Options,
        source: ModelSource,
        plan: EnginePlan,
        copies: Mapping[str, Executable],
        runner: Runner,
    ):
        """`copies`: the programs that copied the weights at start."""
        self._options = options
        self._spec = source.spec
        self._plan = plan
        self._copies = copies
        self._runner = runner
        self._served = plan.weights
        self._model = str(source.folder or source.names[0])
        self._dropped = False

    @property
    def model(self) -> str:
        return self._model

    def load(self, change: WeightChange) -> Callable[[], None]:
        """See `WeightStore.load`."""
        weights = _refusing(lambda: self._planned(change))
        if change.in_place and weights.copying:
            raise WeightsRefused("weights with fp8 copies cannot be replaced in place")
        found = _refusing(lambda: self._loaded(weights, on_host=change.in_place))

        def use() -> None:
            params = self._replaced(found) if change.in_place else found
            self._use(params)
            self._served, self._model = weights, change.model

        return use

    def sleep(self, *, drop_weights: bool) -> None:
        """See `WeightStore.sleep`."""
        self._runner.free_state()
        if drop_weights:
            self._runner.drop_params()
            self._dropped = True

    def reload(self) -> Callable[[], None]:
        """See `WeightStore.reload`."""
        found = None
        if self._dropped:
            found = _refusing(lambda: self._loaded(self._served, on_host=False))

        def use() -> None:
            if found is not None:
                self._use(found)
            self._runner.reset()

        return use

    def _use(self, params: decoder.Params) -> None:
        try:
            self._runner.use_params(params)
        except ValueError as error:
            raise WeightsRefused(str(error)) from None
        self._dropped = False

    def _planned(self, change: WeightChange) -> WeightPlan:
        """Returns the plan of weights with the shapes, formats and dtypes of the served ones."""
        options = replace(
            self._options,
            model=change.model,
            from_step=change.step,
            keep_converted=False,
            load_format="auto",
        )
        source = find_weights(options)
        if source.spec != self._spec:
            raise ConfigError(f"{change.model}: a different model than the served one")
        gpu = jax.default_backend() == "gpu"
        found = plan_weights(
            options, source, self._plan.config.dtype, self._plan.cache.folder, stacked=gpu
        )
        check_same(self._plan.weights.encoded, found.encoded)
        if found.native is None and found.quantized:
            raise ConfigError(
                f"{change.model}: would have to be quantised while serving; convert it first, with "
                "jaxserve convert"
            )
        return found.with_fp8_copy() if self._plan.weights.copying else found

    def _loaded(self, weights: WeightPlan, *, on_host: bool) -> decoder.Params:
        own = weights.native
        if weights.folder is None:
            return dummy_params(weights.plain, weights.seed, weights.encode)
        by_start = own is None and weights.quantized  # the start compiled these programs
        if by_start or (weights.staging and not on_host):
            load = weight_loader(weights, self._copies)
            return jax.block_until_ready(load(lambda done, total: None))
        if own is None:
            checkpoint, rules = weights.checkpoint, weights.rules
        else:
            checkpoint, rules = own.tensors, own.rules()
        assert checkpoint is not None and not isinstance(checkpoint, QuantizedCheckpoint)
        place = _on_host if on_host else jax.device_put
        with ThreadPoolExecutor(1, thread_name_prefix="verify") as pool:
            verified = None if own is None else pool.submit(own.verify)
            params = load_leaves(checkpoint, rules, weights.encoded, place=place)
            if verified is not None:
                verified.result()
        if weights.copying:
            params = with_copies(params, self._copies)
        return jax.block_until_ready(params)

    def _replaced(self, found: decoder.Params) -> decoder.Params:
        """Returns the weights `found` on the device. Each takes the place of an old one."""
        check_same(self._plan.weights.served, found)
        old = [] if self._dropped else jax.tree.leaves(self._runner.params)
        self._runner.drop_params()
        leaves: list[Any] = []
        for index, leaf in enumerate(jax.tree.leaves(found)):
            if old:
                old[index].delete()
            leaves.append(jax.block_until_ready(jax.device_put(leaf)))
        return jax.tree.unflatten(jax.tree.structure(found), leaves)


def _on_host(array: Any, sharding: Any) -> Any:
    """Returns an array that does not depend on a file, because the file may disappear."""
    return np.array(array)


def _refusing[T](run: Callable[[], T]) -> T:
    """Calls `run`. Turns errors about the weights into WeightsRefused with a one-line message."""
    try:
        return run()
    except (ConfigError, CheckpointError, OSError, ValueError) as error:
        raise WeightsRefused(str(error)) from None
    except jax.errors.JaxRuntimeError as error:
        if not memory.is_exhausted(error):
            raise
        raise WeightsRefused(
            "too little memory on the device for other weights beside those that are served: "
            "replace them in place, or lower --gpu-memory-utilization or --kv-cache-memory-bytes"
        ) from None
