"""Lower tiers for KV cache pages on the host: memory, copies and files. Does not use jax."""
