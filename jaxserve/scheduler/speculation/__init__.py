"""Speculative decoding: proposers of draft tokens, and when verifying drafts pays."""
