"""megatron-core's BertModel (local layer spec) and its DistributedDataParallel.

As for GPT (`benchmarks/contenders/megatron.py`), SDPA replaces its unfused attention, and the fp32 main
parameters, the clipping and the fused AdamW step are ours.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.contenders.bert import BertShape
from benchmarks.contenders.bert.plain import Micro, collate
from benchmarks.contenders.megatron import MainParameters, config_of


class SdpaPaddedAttention(nn.Module):
    """Attention of [s, b, heads, d] tensors, to [s, b, heads * d]; True in the mask forbids."""

    def __init__(self, config, **_options):
        super().__init__()
        self.dropout = config.attention_dropout

    def forward(self, query, key, value, attention_mask, **_options):
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=~attention_mask, dropout_p=self.dropout)
        return out.permute(2, 0, 1, 3).flatten(2)


def _model(shape: BertShape):
    """megatron-core's DistributedDataParallel around its BertModel."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    parallel_state.initialize_model_parallel()
    spec = copy.deepcopy(bert_layer_local_spec)
    spec.submodules.self_attention.submodules.core_attention = SdpaPaddedAttention
    config = replace(config_of(shape), hidden_dropout=shape.dropout, attention_dropout=shape.dropout)
    # The model asks for Transformer Engine's version if its attention is not its own.
    asks = "_sanity_check_attention_and_get_attn_mask_dimension"
    with mock.patch.object(BertModel, asks, return_value="b11s"):
        model = BertModel(
            config,
            num_tokentypes=2,
            transformer_layer_spec=spec,
            vocab_size=shape.vocab,
            max_sequence_length=shape.sequence,
            share_embeddings_and_output_weights=True,
        )
    model = model.to(shape.device, shape.torch_dtype)
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    return DistributedDataParallel(config, options, model)


def _loss(model: nn.Module, batch: Micro) -> torch.Tensor:
    counted = batch.labels >= 0
    losses, order = model(batch.tokens, batch.real.long(), batch.types, batch.labels.clamp(min=0))
    restored = (losses.float() * counted).sum() / counted.sum()
    return restored + F.cross_entropy(order.float(), batch.is_random)


def build(shape: BertShape, rank: int, world_size: int):
    from megatron.core import parallel_state

    torch.manual_seed(0)
    # megatron-core allocates its gradient buffers on "the current CUDA device".
    with mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")):
        model = _model(shape)
    optimizer = MainParameters(model, parallel_state.get_tensor_model_parallel_group())
    steps = shape.steps(rank, lambda arrays: collate(shape, arrays))
    model.train()

    def step() -> float:
        batches = next(steps)
        model.zero_grad_buffer()
        for i, batch in enumerate(batches):
            with contextlib.nullcontext() if i == len(batches) - 1 else model.no_sync():
                loss = _loss(model, batch)
                (loss / len(batches)).backward()
        model.finish_grad_sync()
        optimizer.step()
        return float(loss.detach())

    return step
