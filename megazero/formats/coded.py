"""Gives linear layers the codes of a folder instead of the floats that they stand for."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from megazero.checkpoint.part import Source
from megazero.checkpoint.shards import parts_of_parameters
from megazero.formats.hf.reader import HFReader
from megazero.layers.coded import give_codes, takes_codes
from megazero.layers.latent import LatentAttention
from megazero.mpu.context import ParallelContext
from megazero.mpu.param_spec import spec_of
from megazero.ops.coded_linear import CodedWeight


def keep_codes(chunks: Iterable[nn.Module], source: Source, context: ParallelContext) -> tuple[str, ...]:
    """Let this rank's linear layers compute with the codes in a folder; their weights are not read as floats.

    Returns:
        A remark that names the weights with codes which will be read as floats: experts, latent attention,
        tied tables, and slices over ranks that leave too few neighbours in a group.
    """
    if not isinstance(source, HFReader) or not source.coded:
        return ()
    chunks = tuple(chunks)
    for chunk in chunks:
        latents = (module for module in chunk.modules() if isinstance(module, LatentAttention))
        apart = {part for latent in latents for part in latent.modules()}
        for layer in chunk.modules():
            if layer in apart or not takes_codes(layer):
                continue
            (part,) = parts_of_parameters([layer.weight], context)
            quantized = source.quantized(part.key, part.box)
            if quantized is not None:
                codes, scales = (t.to(context.device) for t in (quantized.codes, quantized.scales))
                give_codes(layer, CodedWeight.of(codes, scales, quantized.bits, quantized.rounds_inputs))
    names = {spec.tied_with or spec.name for chunk in chunks for spec in map(spec_of, chunk.parameters())}
    left = sorted({re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names & source.coded})
    return (f"quantized weights are read as floats: {', '.join(left)}",) if left else ()
