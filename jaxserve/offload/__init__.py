"""The host's side of tiers for pages of the KV cache: memory, copies, files. Knows no jax."""
