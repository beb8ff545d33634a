"""A driver of the tests' own for whoever asks for CUDA's."""

from __future__ import annotations

import pytest

from jaxserve.offload.cuda import CudaContext
from jaxserve_kernels import cuda_driver
from tests.offload.fake_cuda import FakeCuda


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """In the place of libcuda.so.1."""
    fake = FakeCuda()
    monkeypatch.setattr(cuda_driver, "library", lambda: fake)
    monkeypatch.setattr(cuda_driver, "locked_library", lambda: fake)
    return fake


@pytest.fixture
def cuda(driver: FakeCuda) -> CudaContext:
    """The context of the first GPU of `driver`."""
    return CudaContext()
