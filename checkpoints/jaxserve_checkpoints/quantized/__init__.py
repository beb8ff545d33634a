"""Quantised checkpoints from other tools: their formats, read into this engine's weight types."""

from jaxserve_checkpoints.quantized.detect import detect as detect
from jaxserve_checkpoints.quantized.format import Format as Format
from jaxserve_checkpoints.quantized.modules import PackedModules as PackedModules
from jaxserve_checkpoints.quantized.modules import QuantizedCheckpoint as QuantizedCheckpoint
