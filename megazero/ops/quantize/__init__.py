"""Blockwise quantization to int8, int4 and fp8, for communication; with its tables of implementations."""

from megazero.ops.quantize.front import DEQUANTIZE, QUANTIZE, dequantize, quantize
from megazero.ops.quantize.reference import dequantize_reference, quantize_reference
from megazero.ops.quantize.scheme import CODE_FORMATS, Quantization

__all__ = [
    "CODE_FORMATS",
    "DEQUANTIZE",
    "QUANTIZE",
    "Quantization",
    "dequantize",
    "dequantize_reference",
    "quantize",
    "quantize_reference",
]
