"""IQ2_XXS: bytes as GGUF files have them mean what the format defines."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from lab.embedded.iq2_xxs import BLOCK_BYTES, grid, read_iq2_xxs


def test_the_grid_is_that_of_the_format() -> None:
    """Some entries as ggml writes them, eight bytes from the high one down, and what all share."""
    points = grid()
    for index, text in {
        0: "0808080808080808",
        1: "080808080808082b",
        2: "0808080808081919",
        255: "2b2b2b1908081908",
    }.items():
        assert bytes(points[index][::-1].tolist()).hex() == text
    numbers = [int(bytes(point[::-1].tolist()).hex(), 16) for point in points]
    assert numbers == sorted(set(numbers))
    assert ((points == 25).sum(axis=1) % 2 == 0).all()
    # Of ggml's table, as version 0.19 of the gguf package holds it.
    digest = "05826b5d3e472a3a78f196be62ac78acf81df0f909626e12ab9fa2a5d490dd54"
    assert hashlib.sha256(points.astype(np.uint8).tobytes()).hexdigest() == digest


def dequantize_block(block: bytes) -> list[float]:
    """One weight at a time, from the definition."""
    weights: list[float] = []
    d = float(np.frombuffer(block[:2], "<f2")[0])
    points = grid().tolist()
    for start in range(2, BLOCK_BYTES, 8):
        word = int.from_bytes(block[start + 4 : start + 8], "little")
        scale = d * (0.5 + (word >> 28)) * 0.25
        for eighth in range(4):
            code = (word >> (7 * eighth)) & 127
            signs = [(code >> i) & 1 for i in range(7)]
            signs.append(sum(signs) % 2)
            point = points[block[start + eighth]]
            weights += [scale * (-v if s else v) for v, s in zip(point, signs, strict=True)]
    return weights


def random_bytes(rows: int, blocks: int) -> NDArray[np.uint8]:
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (rows, blocks, BLOCK_BYTES), np.uint8)
    d = rng.uniform(1e-4, 1e-2, (rows, blocks, 1)).astype("<f2")
    data[..., :2] = d.view(np.uint8)
    return data.reshape(rows, -1)


def test_blocks_are_dequantised_as_their_definition_says() -> None:
    data = random_bytes(3, 2)
    expected = [
        dequantize_block(row[:BLOCK_BYTES].tobytes())
        + dequantize_block(row[BLOCK_BYTES:].tobytes())
        for row in data
    ]
    found = read_iq2_xxs(data).dequantize()
    np.testing.assert_array_equal(np.asarray(found), np.float32(expected))
