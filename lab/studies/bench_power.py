"""Measures how fast a step could be at a GPU's power limit: its parts alone, in turn, side by side.

    python -m lab.studies.bench_power --out power.json

A mixed step multiplies 2,048 tokens while 200 decoding tokens read their contexts. Products and
reads use different parts of the GPU, so one might hope to hide one under the other. This script
runs the cheapest form of each part: products by cuBLASLt, reads that only add up what they read,
and PyTorch's attention for the prompts. The parts run alone, one after the other, and at once with
some multiprocessors for the reads and the others for the products. Each runs long enough for the
GPU to reach its power limit. Power and clock stand beside each time.

From the parts it computes the limit of a closed loop if nothing else took any time. A request is
1,152 tokens of products, 127 reads, and the attention of a prompt of 1,024. The script needs torch
and triton beside jaxserve, because two streams must run at once. jaxserve itself imports neither
torch nor this script.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import triton
import triton.language as tl

from jaxserve.model_spec import ModelSpec
from jaxserve.models.registry import NAMED_MODELS

WEIGHTS = 12
"""Layers with their own weights: more than any cache holds. The other layers reuse them."""

READ_LAYERS = 8
"""Layers with their own keys and values."""

BLOCK = 32_768
"""Numbers that a program of the reads adds at a time: 64 KiB."""

SETTLE = 0.45
"""Share of a measurement in which the GPU's clocks settle."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """A mixed step, and the requests of a closed loop that such steps serve."""

    spec: ModelSpec
    tokens: int = 2048
    decodes: int = 200
    context: int = 1088
    prompt: int = 1024
    answer: int = 128

    @property
    def read(self) -> int:
        """Returns how many numbers of keys and values the decodes of one layer read."""
        return self.decodes * self.context * 2 * self.spec.kv_size


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds of a part per step, with the GPU's power in watts and clock in MHz."""

    what: str
    ms: float
    watts: float
    mhz: float


@triton.jit
def add_up(numbers, sums, blocks, SIZE: tl.constexpr):
    """Sums blocks. Programs take blocks in turn. Each stores one sum, so that no read is
    removed."""
    program = tl.program_id(0)
    total = tl.zeros([SIZE], tl.float32)
    for block in range(program, blocks, tl.num_programs(0)):
        total += tl.load(numbers + block.to(tl.int64) * SIZE + tl.arange(0, SIZE)).to(tl.float32)
    tl.store(sums + program, tl.sum(total))


class Parts:
    """The arrays of a load, and the work of a step of all layers on them."""

    def __init__(self, load: Load) -> None:
        torch.manual_seed(0)
        spec, self.load = load.spec, load
        shapes = (
            (spec.q_size + 2 * spec.kv_size, spec.embed),
            (spec.embed, spec.q_size),
            (2 * spec.ffn, spec.embed),
            (spec.embed, spec.ffn),
        )
        self.weights = [[random(*shape) * 0.02 for shape in shapes] for _ in range(WEIGHTS)]
        self.inputs = {depth: random(load.tokens, depth) for _, depth in shapes}
        self.outputs = {out: random(load.tokens, out) for out, _ in shapes}
        self.last, self.output_matrix = (
            random(load.decodes, spec.embed),
            random(spec.vocab_size, spec.embed),
        )
        self.keys_values = torch.cat([random(load.read) for _ in range(READ_LAYERS)])
        self.sums = torch.zeros(4096, device="cuda")
        prompts = max(1, load.tokens // load.prompt)
        self.query = random(prompts, spec.q_heads, load.prompt, spec.head_dim)
        self.key = random(prompts, spec.kv_heads, load.prompt, spec.head_dim)
        self.reads_stream, self.products_stream = torch.cuda.Stream(), torch.cuda.Stream()

    def products(self) -> None:
        for layer in range(self.load.spec.num_layers):
            for weight in self.weights[layer % WEIGHTS]:
                out, depth = weight.shape
                torch.mm(self.inputs[depth], weight.t(), out=self.outputs[out])
        torch.mm(self.last, self.output_matrix.t())

    def reads(self, programs: int) -> None:
        """Reads keys and values in as few kernels as there are repetitions of them."""
        layers = self.load.spec.num_layers
        while layers:
            count = min(layers, READ_LAYERS)
            blocks = count * self.load.read // BLOCK
            add_up[(programs,)](self.keys_values, self.sums, blocks, SIZE=BLOCK, num_warps=32)
            layers -= count

    def attention(self) -> None:
        for _ in range(self.load.spec.num_layers):
            torch.nn.functional.scaled_dot_product_attention(
                self.query, self.key, self.key, is_causal=True, enable_gqa=True
            )

    def side_by_side(self, programs: int, steps: int) -> None:
        """Runs both at once. Reads begin first, so that their programs find multiprocessors."""
        with torch.cuda.stream(self.reads_stream):
            for _ in range(steps):
                self.reads(programs)
        with torch.cuda.stream(self.products_stream):
            for _ in range(steps):
                self.products()


def random(*shape: int) -> torch.Tensor:
    """Returns normal random numbers, because the power depends on the values."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


class Meter:
    """Times work in steady state, with nvidia-smi's power and clock of that time."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, float]] = []
        self.timings: list[Timing] = []
        card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        query = "--query-gpu=power.draw.instant,clocks.sm"
        command = ["nvidia-smi", "-i", card, query, "--format=csv,noheader,nounits", "-lms", "100"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        for line in self.process.stdout or ():
            watts, mhz = (float(value) for value in line.split(","))
            self.samples.append((time.monotonic(), watts, mhz))

    def time(self, what: str, run: Callable[[], None], *, steps: int, seconds: float) -> Timing:
        """Returns the median of calls of `steps` steps each, after the first part of `seconds`."""
        run()
        torch.cuda.synchronize()
        begun, ends = time.monotonic(), list[float]()
        while time.monotonic() - begun < seconds:
            run()
            torch.cuda.synchronize()
            ends.append(time.monotonic())
        settled = begun + SETTLE * seconds
        times = [b - a for a, b in pairwise(ends) if b > settled]
        power = [sample for sample in self.samples if sample[0] > settled] or [(0.0, 0.0, 0.0)]
        timing = Timing(
            what=what,
            ms=round(1e3 * median(times) / steps, 3),
            watts=round(fmean(watts for _, watts, _ in power)),
            mhz=round(fmean(mhz for _, _, mhz in power)),
        )
        self.timings.append(timing)
        print(
            f"{what:55} {timing.ms:7.2f} ms {timing.watts:5.0f} W {timing.mhz:6.0f} MHz", flush=True
        )
        return timing

    def close(self) -> None:
        self.process.kill()


def measure(load: Load, seconds: float, shared: list[int]) -> dict[str, Any]:
    """Returns all timings, and the limit of a closed loop that they give."""
    parts, meter, steps = Parts(load), Meter(), 4
    every = torch.cuda.get_device_properties(0).multi_processor_count

    def timed(what: str, *calls: Callable[[], None]) -> float:
        def run() -> None:
            for _ in range(steps):
                for call in calls:
                    call()

        return meter.time(what, run, steps=steps, seconds=seconds).ms

    def reads() -> None:
        parts.reads(2 * every)

    products = timed(f"products of {load.tokens} tokens", parts.products)
    read = timed(f"reads of {load.decodes} contexts of {load.context}", reads)
    attention = timed(
        f"attention of {parts.query.shape[0]} prompts of {load.prompt}", parts.attention
    )
    in_turn = timed("products and reads in turn", parts.products, reads)
    beside: dict[int, float] = {}
    for programs in shared:
        torch._C._set_sm_carveout_experimental(programs)
        what = f"… at once, {programs} of {every} multiprocessors for reads"
        beside[programs] = meter.time(
            what, lambda p=programs: parts.side_by_side(p, steps), steps=steps, seconds=seconds
        ).ms
        torch._C._set_sm_carveout_experimental(None)
    meter.close()
    request = (
        products * (load.prompt + load.answer) / load.tokens
        + read * (load.answer - 1) / load.decodes
        + attention / parts.query.shape[0]
    )
    best = min([in_turn, *beside.values()])
    return {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "load": {name: value for name, value in asdict(load).items() if name != "spec"},
        "timings": [asdict(each) for each in meter.timings],
        "request_ms": round(request, 3),
        "requests_per_second": round(1e3 / request, 2),
        "gained_side_by_side": round(1 - best / in_turn, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(NAMED_MODELS), default="qwen3-4b")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--shared", default="16,20,24,32", help="multiprocessors for reads")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    load = Load(spec=NAMED_MODELS[args.model])
    result = measure(load, args.seconds, [int(each) for each in args.shared.split(",")])
    print(
        f"a request of {load.prompt} in and {load.answer} out: {result['request_ms']} ms of these "
        f"parts, {result['requests_per_second']} per second at best; side by side "
        f"{100 * result['gained_side_by_side']:.1f} % less than in turn"
    )
    if args.out:
        args.out.write_text(
            json.dumps({"model": args.model, **result}, indent=1, ensure_ascii=False) + "\n"
        )


if __name__ == "__main__":
    main()
