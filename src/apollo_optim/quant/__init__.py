"""Numbers narrower than float32: how they are rounded, and weights kept as int8."""

from .int8 import Int8Weight
from .model import dequantize_weights_, int8_part, quantize_weights_

__all__ = ["Int8Weight", "dequantize_weights_", "int8_part", "quantize_weights_"]
