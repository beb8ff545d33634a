"""The embedded model's tokenizer, and a compiler of grammars for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxserve.metrics.metrics import Metrics
from jaxserve.structured import Guides
from jaxserve.tokenizer import HfTokenizer, Tokenizer
from jaxserve_checkpoints.resolve import embedded_model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return HfTokenizer.from_folder(embedded_model())


@pytest.fixture(scope="module")
def guides(tokenizer: Tokenizer) -> Iterator[Guides]:
    made = Guides(tokenizer, Metrics("tiny"))
    yield made
    made.close()
