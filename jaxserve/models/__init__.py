"""Models: pure functions on pytrees of arrays."""
