"""Where drafts of next tokens come from: what --speculative-config says."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.config import VERIFY_POSITIONS, ConfigError

SPECULATION_METHODS = ("ngram", "suffix")
"""vLLM's names. Both look up what followed where a text's end occurred in it before."""

HEAD_METHODS = ("dflash", "dspark", "eagle3", "draft_model")
"""Names of what drafts with weights, which need a model. The model's files say which it is."""

MTP_METHODS = ("mtp", "qwen3_next_mtp", "qwen3_5_mtp")
"""vLLM's names of what drafts with weights of the model's own checkpoint."""


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Where drafts of next tokens come from, and how many a step verifies."""

    drafts: int = max(VERIFY_POSITIONS) - 1
    """Of a row at most; 0: no step verifies."""
    least_match: int = 3
    """Tokens that must occur again before drafts are taken from what follows them."""
    most_match: int = 32
    """Tokens after which a longer occurrence is not looked for."""
    shared_tokens: int = 0
    """Tokens of outputs that are kept to look up later requests of the same tenant; 0: none."""
    model: str | None = None
    """A folder, Hub id or short name of a draft head or draft model; None: drafts are looked up, or
    made as `native` says."""
    native: bool = False
    """The model's own weights for multi-token prediction draft."""

    def __post_init__(self) -> None:
        if self.drafts < 0:
            raise ConfigError(f"num_speculative_tokens must be at least 1, got {self.drafts}")
        if not 1 <= self.least_match <= self.most_match:
            raise ConfigError(
                "prompt_lookup_min must be at least 1 and at most prompt_lookup_max, got "
                f"{self.least_match} and {self.most_match}"
            )

    @property
    def positions(self) -> tuple[int, ...]:
        """Of the verify buckets that are needed."""
        if not self.drafts:
            return ()
        most = next((p for p in VERIFY_POSITIONS if p > self.drafts), VERIFY_POSITIONS[-1])
        return tuple(each for each in VERIFY_POSITIONS if each <= most)


NO_SPECULATION = SpeculationConfig(drafts=0)
