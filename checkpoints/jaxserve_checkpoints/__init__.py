"""Checkpoints: from bytes on disk to named arrays."""
