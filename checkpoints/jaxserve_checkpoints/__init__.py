"""Reads, converts and writes checkpoints."""
