"""NVIDIA's megatron-core: its GPTModel (local layer spec) and its DistributedDataParallel, T=1 or T=2.

Two pieces are ours, because megatron-core has none that runs here. SDPA replaces its unfused attention,
as Transformer Engine's fused one would on a GPU. Its optimizers accept CUDA tensors only, so
the fp32 main parameters, the clipping over the tensor-parallel ranks and the fused AdamW step are in this
file. In fp32 and from the plain GPT's weights, it gives the plain GPT's losses.
"""

from __future__ import annotations

import contextlib
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.contenders import Shape


class SdpaCoreAttention(nn.Module):
    """Causal attention of [s, b, heads, d] queries, keys and values, to [s, b, heads * d]."""

    def __init__(self, **_options):
        super().__init__()

    def forward(self, query, key, value, _attention_mask=None, **_options):
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)


def config_of(shape: Shape, tp: int = 1):
    """megatron-core's configuration of the shape, without dropout."""
    from megatron.core.transformer import TransformerConfig

    normal = partial(nn.init.normal_, mean=0.0, std=0.02)
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        tensor_model_parallel_size=tp,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_func=partial(F.gelu, approximate="tanh"),
        init_method=normal,
        output_layer_init_method=normal,
        use_cpu_initialization=shape.device == "cpu",
        bf16=shape.dtype == "bf16",
        params_dtype=shape.torch_dtype,
        pipeline_dtype=shape.torch_dtype,
    )


def _model(shape: Shape, tp: int):
    """megatron-core's DistributedDataParallel around its GPTModel."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = SdpaCoreAttention
    config = config_of(shape, tp)
    model = GPTModel(
        config,
        spec,
        vocab_size=shape.vocab,
        max_sequence_length=shape.sequence,
        share_embeddings_and_output_weights=True,
        position_embedding_type="learned_absolute",
    )
    model = model.to(shape.device, shape.torch_dtype)
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    return DistributedDataParallel(config, options, model)


class MainParameters:
    """AdamW on fp32 copies of the parameters, whose gradients are megatron-core's `main_grad` buffers."""

    def __init__(self, model: nn.Module, tp_group):
        self.parameters = list(model.parameters())
        self.main = [p.detach().clone().float().requires_grad_() for p in self.parameters]
        self.tp_group = tp_group
        self.optimizer = torch.optim.AdamW(
            self.main, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        for main, parameter in zip(self.main, self.parameters, strict=True):
            main.grad = parameter.main_grad

    def _norm(self) -> torch.Tensor:
        """The norm over the tensor-parallel ranks: sharded gradients count on each, replicated ones once."""
        squares = torch.stack(torch._foreach_norm([m.grad for m in self.main])).square()
        split = [getattr(p, "tensor_model_parallel", False) for p in self.parameters]
        split = torch.tensor(split, device=squares.device)
        sharded = squares[split].sum()
        if self.tp_group.size() > 1:
            dist.all_reduce(sharded, group=self.tp_group)
        return (sharded + squares[~split].sum()).sqrt()

    @torch.no_grad()
    def step(self) -> None:
        factor = torch.clamp(1.0 / (self._norm() + 1e-6), max=1.0)
        torch._foreach_mul_([m.grad for m in self.main], factor)
        self.optimizer.step()
        torch._foreach_copy_(self.parameters, self.main)


def build(shape: Shape, rank: int, world_size: int, tp: int = 1):
    from megatron.core import parallel_state

    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        if shape.device == "cuda":
            torch.cuda.set_device(rank)
        else:
            # megatron-core allocates its gradient buffers on "the current CUDA device".
            cpu = torch.device("cpu")
            stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value=cpu))
        model = _model(shape, tp)
    optimizer = MainParameters(model, parallel_state.get_tensor_model_parallel_group())
    batches = shape.batches(parallel_state.get_data_parallel_rank())
    positions = torch.arange(shape.sequence, device=shape.device).expand(shape.micro_batch, -1)

    def step() -> float:
        model.zero_grad_buffer()
        for i, (tokens, labels) in enumerate(batches):
            with contextlib.nullcontext() if i == len(batches) - 1 else model.no_sync():
                loss = model(tokens, positions, None, labels=labels).mean()
                (loss / len(batches)).backward()
        model.finish_grad_sync()
        optimizer.step()
        return float(loss.detach())

    return step
