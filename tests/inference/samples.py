"""Small models of both shapes, whole or as one rank's slice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megazero.config.tree.model import ModelConfig
from megazero.layers.initialize import initialize
from megazero.layers.placement import Placement
from megazero.models.chunk import Slice
from megazero.models.gpt import GPT
from megazero.mpu.context import ParallelContext, solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.spec.resolve import model_spec

VOCAB = (53, 64)  # entries, entries after padding

# Large initial weights: equal tokens from models that prefer none would prove little.
COMMON = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 24}
GPT2 = ModelConfig(**COMMON, init_method_std=0.4)
LLAMA = ModelConfig(
    **COMMON,
    init_method_std=0.4,
    num_query_groups=2,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    ffn_hidden_size=24,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
LLAMA_FOUR_GROUPS = LLAMA.model_copy(update={"num_query_groups": 4})

SIZES = {"mamba_state_dim": 5, "mamba_head_dim": 4, "mamba_num_groups": 2, "mamba_num_heads": 8}
HYBRID = ModelConfig(
    **{**COMMON, "num_layers": 5},
    **SIZES,
    init_method_std=0.4,
    hybrid_layer_pattern="-M*M-",
    position_embedding_type="rope",
    normalization="RMSNorm",
)

# Lengths on both sides of each other and a single token; ids within VOCAB.
PROMPTS = [[5, 17, 3, 44, 8, 21, 9], [52], [0, 1, 2], [30, 30, 31, 7]]


def build(config: ModelConfig, context: ParallelContext | None = None, *, sequence_parallel=False) -> GPT:
    """The model of seed 7 on this rank; the same weights on every layout."""
    context = context or solo_context()
    placement = Placement.of(context, torch.float32, sequence_parallel=sequence_parallel)
    model = GPT(Slice(model_spec(config), VOCAB, placement))
    initialize(model, 7, context.place)
    return model


def on_threads(tp: int, work: Callable[[ParallelContext], Any]) -> list[Any]:
    """``work(context)`` on `tp` tensor-parallel ranks."""
    world = ThreadWorld(tp)
    return world.run(lambda rank: work(thread_context(world, ProcessGrid(tp=tp), rank)))
