"""IQ2_XXS, llama.cpp's weights of 2.06 bits: eight at a time are a point of a grid, with signs.

For comparison with other formats only: no checkpoint of it is served. A block of 256 weights is 66
bytes: a float16 `d`, then for each 32 weights four bytes, points of the grid for 8 weights each,
and a little-endian 32-bit word with four sign codes of 7 bits from the low end up and a scale of 4
bits above them. Bit i of a sign code is weight i's sign; the eighth makes the number of minuses
even. The layout and the grid are those of ggml's `block_iq2_xxs` and `iq2xxs_grid`
(github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h), facts of the format.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

BLOCK, BLOCK_BYTES = 256, 66
LEVELS = (8, 25, 43)
_POINTS = """
    0 2 4 6 8 10 12 18 20 24 26 28 30 36 42 46 48 54 56 62 74 82 84 90 94 108 138 150 162
    164 182 218 244 246 252 262 264 270 272 276 288 298 300 306 318 324 326 330 342 356 376
    378 388 412 414 432 462 480 486 490 492 498 510 514 516 522 524 546 570 594 650 660 730
    732 738 748 756 774 786 792 796 810 816 828 846 854 864 912 922 972 978 990 994 1006
    1026 1068 1100 1134 1148 1216 1218 1224 1242 1270 1296 1300 1368 1414 1458 1460 1466
    1488 1504 1512 1514 1564 1572 1620 1622 1702 1704 1710 1728 1742 1782 1810 1830 1926
    1950 1962 2010 2136 2188 2190 2196 2202 2206 2208 2214 2220 2228 2232 2242 2244 2250
    2268 2286 2314 2322 2326 2350 2358 2382 2390 2400 2430 2436 2448 2484 2500 2522 2532
    2592 2674 2676 2682 2700 2704 2754 2796 2800 2810 2866 2898 2916 2922 2926 2932 2934
    2970 2976 3000 3026 3072 3142 3222 3224 3248 3322 3360 3402 3412 3418 3450 3510 3570
    3648 3654 3672 3696 3726 3766 3822 3852 3888 3892 3978 3980 4026 4160 4374 4376 4382
    4402 4430 4458 4470 4482 4546 4618 4620 4626 4630 4644 4662 4698 4730 4764 4786 4806
    4824 4862 4944 5032 5106 5112 5124 5130 5176 5198 5238 5296 5346 5366 5376 5464 5644
    5688 5834 5868 5890 5920 5994 6090 6354 6402
"""


def grid() -> NDArray[np.int8]:
    """The 256 points [256, 8]. Each number above has weight i's level as its digit i in base 3."""
    numbers = np.array(_POINTS.split(), np.int32)
    digits = numbers[:, None] // 3 ** np.arange(8) % 3
    return np.array(LEVELS, np.int8)[digits]


class Iq2XxsWeight(NamedTuple):
    """weight = d * (0.5 + scale) / 4 * point * sign, in float32."""

    points: Array  # uint8 [out, in / 8]
    signs: Array  # uint32 [out, in / 32]: four sign codes, and the scale in the high bits
    d: Array  # float16 [out, in / 256]

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]"""
        return (*self.points.shape[:-1], 8 * self.points.shape[-1])

    def dequantize(self) -> Array:
        """float32 [out, in]: the definition of what the codes mean."""
        codes = (self.signs[..., None] >> jnp.arange(0, 28, 7, dtype=jnp.uint32)) & 127
        codes = codes.reshape(self.points.shape)
        codes |= (jax.lax.population_count(codes) & 1) << 7
        minus = (codes[..., None] >> jnp.arange(8, dtype=jnp.uint32)) & 1
        values = jnp.asarray(grid(), jnp.float32)[self.points]
        values = jnp.where(minus == 1, -values, values).reshape(self.shape)
        scale = (0.5 + (self.signs >> 28).astype(jnp.float32)) * 0.25
        each = jnp.repeat(self.d.astype(jnp.float32), BLOCK // 32, axis=-1) * scale
        return values * jnp.repeat(each, 32, axis=-1)


def read_iq2_xxs(data: NDArray[np.uint8]) -> Iq2XxsWeight:
    """From bytes as GGUF files have them: [out, in / 256 * 66]."""
    out = data.shape[0]
    blocks = np.ascontiguousarray(data).reshape(out, -1, BLOCK_BYTES)
    d = np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0]
    pairs = np.ascontiguousarray(blocks[..., 2:]).reshape(out, -1, 8)
    signs = np.ascontiguousarray(pairs[..., 4:]).view("<u4")[..., 0]
    points = pairs[..., :4].reshape(out, -1)
    return Iq2XxsWeight(jnp.asarray(points), jnp.asarray(signs), jnp.asarray(d))
