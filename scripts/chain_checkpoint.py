"""Write a Hugging Face folder of a Qwen3 model's shape whose greedy output is known beforehand.

    python scripts/chain_checkpoint.py qwen3-4b /tmp/chain-4b

After each token comes its successor on one circle through the tokenizer's ids (`successors`): the
output matrix holds each token's embedding in its successor's row, and the layers, random otherwise,
add hardly anything. Steps take as long as with any other weights of the shape. So a prompt can hold
as much of the coming answer as a measurement of speculation wants. 9 GB for qwen3-4b. A folder
that has the weights already is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
from random_checkpoint import hf_config, tensors, write

from jaxserve.model_spec import ModelSpec
from jaxserve.models.registry import NAMED_MODELS
from jaxserve_checkpoints import resolve
from jaxserve_checkpoints.reader import SINGLE_FILE

TOKENIZER = Path(resolve.__file__).parent / "embedded"
QUIET = ("o_proj.weight", "down_proj.weight")
"""What adds to the residual stream."""
_SHARE = 1e-4
"""Of its usual size, which is that of the embeddings times the square root of their width."""


def successors() -> list[int]:
    """Which token comes after each, of those that the tokenizer has: one circle in random order."""
    content = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {*content["model"]["vocab"].values(), *(each["id"] for each in content["added_tokens"])}
    order = np.random.default_rng(1).permutation(max(ids) + 1)
    following = np.empty_like(order)
    following[order] = np.roll(order, -1)
    return following.tolist()


def make(spec: ModelSpec, folder: Path) -> None:
    """Write the folder, or keep it if it is complete and of that shape."""
    spec = replace(spec, tie_embeddings=False)
    config = json.dumps(hf_config(spec), indent=1)
    written = folder / "config.json"
    if (folder / SINGLE_FILE).exists() and written.exists() and written.read_text() == config:
        return
    folder.mkdir(parents=True, exist_ok=True)
    written.write_text(config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    unfinished = folder / f".{SINGLE_FILE}.{os.getpid()}"
    write(unfinished, dict(tensors(spec)))
    _chain(unfinished)
    unfinished.replace(folder / SINGLE_FILE)


def _chain(file: Path) -> None:
    """Change random weights to those of the module's first lines."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    data = np.memmap(file, np.uint8, "r+", offset=8 + size)

    def tensor(name: str) -> np.ndarray:
        first, end = header[name]["data_offsets"]
        return data[first:end].view(ml_dtypes.bfloat16).reshape(header[name]["shape"])

    for name in header:
        if name.endswith(QUIET):
            weight = tensor(name)
            weight[:] = weight * ml_dtypes.bfloat16(_SHARE)
    tensor("model.norm.weight")[:] = 1
    following = np.array(successors())
    head, embedding = tensor("lm_head.weight"), tensor("model.embed_tokens.weight")
    head[following] = embedding[: len(following)]
    data.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=sorted(NAMED_MODELS))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    make(NAMED_MODELS[options.model], options.folder)


if __name__ == "__main__":
    main()
