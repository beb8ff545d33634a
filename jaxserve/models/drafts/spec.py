"""The shape of a draft head, or of a draft model, as data. No I/O, no arrays.

`jaxserve.models.drafts.layouts` reads it from a `config.json`. A head reads the hidden states of
the target model after some of its layers, the *taps*. The keys and values of the head's own layers
lie in a draft cache, which shares the page numbers of the target's first cache group: see
`runner.draft_cache`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxserve.model_spec import ModelSpec

type ConfidenceInput = Literal["hidden", "hidden and markov"]
"""The input of a confidence head: the hidden state, alone or with the Markov head's row for the
token before."""


@dataclass(frozen=True, kw_only=True)
class BlockDraft:
    """DFlash (arXiv 2602.06036) and DSpark. The last token and the masks after it form a block. Its
    tokens attend to the whole block and to the context before it. One pass gives all drafts."""

    body: ModelSpec
    """The head's layers. Embedding and output matrix are the target's."""
    taps: tuple[int, ...]
    """Layers of the target, in rising order."""
    block: int
    """Tokens per block."""
    mask_token: int
    """The token id that stands for a token to draft."""
    predicts_next: bool
    """Each position of the block predicts the token after it (DSpark). Otherwise the masks predict
    the token in their own place, and the first position predicts nothing (DFlash)."""
    markov_rank: int = 0
    """Width of the head that adds a score for each pair of consecutive tokens; 0: there is none."""
    confidence: ConfidenceInput | None = None
    """The input of the confidence head; None: there is none."""

    @property
    def num_drafts(self) -> int:
        """Drafts per block."""
        return self.block if self.predicts_next else self.block - 1

    @property
    def room(self) -> int:
        """Positions that drafting writes in the cache, counted from the last known token's."""
        return self.block


@dataclass(frozen=True, kw_only=True)
class Eagle3Draft:
    """EAGLE-3 (arXiv 2503.01840): one layer, one pass per draft. A pass reads the embedding of a
    token and the state of the token before. That state is the target's in the first pass, and the
    head's own in later passes."""

    body: ModelSpec
    """One layer. Its QKV projection reads two states side by side. `vocab_size` is the size of the
    drafts' vocabulary. The embedding is the target's."""
    taps: tuple[int, ...]
    """Layers of the target, in rising order."""
    target_vocab: int
    num_drafts: int = 7
    """Passes, each of which guesses one token."""
    norm_before_residual: bool = False
    """The residual stream begins with the state after its norm."""
    layer_prefix: str = "midlayer"
    """Prefix of the layer's tensor names in the checkpoint. Programs do not depend on it."""

    @property
    def room(self) -> int:
        """As in `BlockDraft`. The first pass writes its entry one position before the last known
        token, each later pass one position further."""
        return self.num_drafts - 1

    @property
    def reduced_vocab(self) -> bool:
        """Whether the drafts' ids are numbers in a list of the target's ids."""
        return self.body.vocab_size != self.target_vocab


@dataclass(frozen=True, kw_only=True)
class MtpDraft:
    """Multi-token prediction with weights from the model's own checkpoint: one layer, one pass per
    draft. A pass reads the embedding of a token and the state of the token before, after the final
    norm. That state is the model's in the first pass, and the head's own in later passes."""

    body: ModelSpec
    """One layer. Embedding and output matrix are the model's."""
    num_drafts: int = 7
    """Passes, each of which guesses one token."""

    @property
    def taps(self) -> tuple[int, ...]:
        """None: the head reads the final hidden state."""
        return ()

    @property
    def room(self) -> int:
        """As in `Eagle3Draft`."""
        return self.num_drafts - 1


type EntryDraft = Eagle3Draft | MtpDraft
"""A head whose entry in the cache at a position needs the token after it."""


@dataclass(frozen=True, kw_only=True)
class ModelDraft:
    """A small model with the target's vocabulary; one pass per draft."""

    body: ModelSpec
    num_drafts: int = 7

    @property
    def taps(self) -> tuple[int, ...]:
        """None: the draft model reads no state of the target."""
        return ()

    @property
    def room(self) -> int:
        """As in `BlockDraft`."""
        return self.num_drafts


type DraftSpec = BlockDraft | EntryDraft | ModelDraft


def mismatches(draft: BlockDraft | Eagle3Draft, target: ModelSpec) -> list[str]:
    """Returns the reasons why the head cannot draft for the target; an empty list if it can."""
    body, found = draft.body, list[str]()
    vocab = body.vocab_size if isinstance(draft, BlockDraft) else draft.target_vocab
    for what, own, other in (
        ("hidden_size", body.embed, target.embed),
        ("vocab_size", vocab, target.vocab_size),
    ):
        if own != other:
            found.append(f"{what} is {own}, the target model's is {other}")
    last = target.num_layers - 1
    if outside := [tap for tap in draft.taps if not 0 <= tap < last]:
        found.append(
            f"it reads the target's states after layers {outside}; supported are layers 0 to "
            f"{last - 1} of {target.num_layers}"
        )
    if list(draft.taps) != sorted(set(draft.taps)):
        found.append(f"the layers that it reads are {list(draft.taps)}, which do not rise")
    if target.cache_groups[0].window is not None:
        found.append("every layer of the target has a window: no pages hold a whole context")
    return found
