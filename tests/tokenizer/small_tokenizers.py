"""Tokenizers as Llama 3 and Mistral ship them, with vocabularies of a few hundred tokens."""

from __future__ import annotations

import json
from typing import Any, Literal

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = (
    "the quick brown fox jumps over the lazy dog and the cat sat on the mat while it was raining",
    "def main ( ) :     return [ INST ] a harbour pilot keeps three notebooks , one for tides",
)
MARKERS = ["[INST]", "[/INST]"]

type Spaces = Literal["first", "always", "normalizer"]


def trained() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Pieces and merges of the text, where ▁ begins a word."""
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    model.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    content = json.loads(model.to_str())["model"]
    return content["vocab"], [(left, right) for left, right in content["merges"]]


def sentence_piece(
    spaces: Spaces, *, without: str | None = None, byte_fallback: bool = True, bos: bool = True
) -> tokenizers.Tokenizer:
    """Mistral's and Llama 2's kind. `spaces` says who puts one before a text."""
    pieces, merges = trained()
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁▁", *pieces]
    vocab = {name: index for index, name in enumerate(name for name in names if name != without)}
    merges = [("▁", "▁"), *merges]
    model = models.BPE(
        vocab=vocab, merges=merges, byte_fallback=byte_fallback, unk_token="<unk>", fuse_unk=True
    )
    full = tokenizers.Tokenizer(model)
    if spaces == "normalizer":
        parts: list[Any] = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        full.normalizer = normalizers.Sequence(parts)
    else:
        full.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=spaces, split=False)
    back: list[Any] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    full.decoder = decoders.Sequence(back)
    full.add_special_tokens(["<unk>", "<s>", "</s>", *MARKERS])
    if bos:
        full.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
        )
    return full


def llama3() -> tokenizers.Tokenizer:
    """Byte-level, with a post-processor that begins every text."""
    full = tokenizers.Tokenizer(models.BPE())
    full.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    full.train_from_iterator(TEXT, trainer)
    full.decoder = decoders.ByteLevel()
    full.add_special_tokens(["<|begin_of_text|>", "<|eot_id|>"])
    begin = full.token_to_id("<|begin_of_text|>")
    parts: list[Any] = [
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(
            single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)]
        ),
    ]
    full.post_processor = processors.Sequence(parts)
    return full
