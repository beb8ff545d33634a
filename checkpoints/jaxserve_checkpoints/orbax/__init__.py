"""Orbax checkpoints: finding the step, the names in the tree, reading and writing.

Nothing here imports tensorstore or orbax before a checkpoint is read or written.
"""

from jaxserve_checkpoints.orbax.folder import OrbaxStep, find_step
from jaxserve_checkpoints.orbax.reader import OrbaxCheckpoint, open_orbax

__all__ = ["OrbaxCheckpoint", "OrbaxStep", "find_step", "open_orbax"]
