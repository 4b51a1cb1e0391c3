"""Small models for the tests of conversion: shapes, random weights as a `Source`, folders of files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megazero.checkpoint.box import Box
from megazero.checkpoint.naming import Table
from megazero.checkpoint.part import ROUTER, Key, Part, Source
from megazero.checkpoint.shards import parts_of_parameters
from megazero.config.tree.model import ModelConfig
from megazero.formats.hf.config_json import TokenIds, architecture_of, config_of
from megazero.layers.collectives import gather_features
from megazero.layers.placement import Placement
from megazero.models.batch import Batch
from megazero.models.chunk import Slice
from megazero.models.gpt import GPT
from megazero.moe.router import Router
from megazero.mpu.context import ParallelContext, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.param_spec import spec_of
from megazero.mpu.thread_group import ThreadWorld
from megazero.spec.resolve import model_spec

VOCAB = 101

# Ragged on purpose: no two sizes alike, and nothing that is a default.
GPT2 = ModelConfig(
    num_layers=2,
    hidden_size=42,
    num_attention_heads=6,
    seq_length=31,
    ffn_hidden_size=74,
    norm_epsilon=3e-4,
    init_method_std=0.08,
    hidden_dropout=0.2,
    attention_dropout=0.3,
)
LLAMA = ModelConfig(
    num_layers=2,
    hidden_size=36,
    num_attention_heads=6,
    num_query_groups=2,
    kv_channels=10,
    seq_length=31,
    ffn_hidden_size=58,
    position_embedding_type="rope",
    rotary_base=500.0,
    normalization="RMSNorm",
    norm_epsilon=3e-4,
    activation="swiglu",
    add_bias_linear=False,
    init_method_std=0.08,
    hidden_dropout=0.0,
    attention_dropout=0.3,
    untie_embeddings_and_output_weights=True,
)
BLOOM = GPT2.model_copy(
    update={"position_embedding_type": "alibi", "embed_layernorm": True, "ffn_hidden_size": None}
)
# It sees 4 tokens, itself included.
MISTRAL = LLAMA.model_copy(update={"window_size": (3, 0)})
QWEN2 = LLAMA.model_copy(
    update={
        **{"kv_channels": None, "add_qkv_bias": True},
        **{"window_size": (4, 0), "window_attn_skip_freq": (0, 1)},
    }
)
UNTIED = {"untie_embeddings_and_output_weights": True}
TIED = {"untie_embeddings_and_output_weights": False}
MODELS: Mapping[str, ModelConfig] = {
    "gpt2": GPT2,
    "gpt2-untied": GPT2.model_copy(update=UNTIED),
    "gpt2-exact-gelu": GPT2.model_copy(update={"activation": "gelu_exact"}),
    "llama": LLAMA,
    "llama-tied": LLAMA.model_copy(update=TIED),
    "llama-biases": LLAMA.model_copy(update={"add_bias_linear": True}),
    "qwen2": LLAMA.model_copy(update={"kv_channels": None, "add_qkv_bias": True}),
    "bloom": BLOOM,
    "bloom-untied": BLOOM.model_copy(update={**UNTIED, "apply_residual_connection_post_layernorm": True}),
    "mistral": MISTRAL,
    "qwen2-windows": QWEN2,
    "qwen2-every-second-window": QWEN2.model_copy(update={"window_attn_skip_freq": (2,)}),
    "llama-one-group": LLAMA.model_copy(update={"num_query_groups": 1}),
    "llama-all-groups": LLAMA.model_copy(update={"num_query_groups": 6, "kv_channels": None}),
}


class MemorySource:
    """Tensors by name, as a `Source` that records the most elements requested at once."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.tensors = {Key(name): tensor for name, tensor in tensors.items()}
        self.most = 0

    @property
    def shapes(self) -> Mapping[Key, tuple[int, ...]]:
        return {key: tuple(tensor.shape) for key, tensor in self.tensors.items()}

    def read(self, parts: Iterable[Part]) -> None:
        for part in parts:
            assert part.box.overlap(Box.whole(part.shape)) == part.box
            self.most = max(self.most, part.box.numel)
            part.tensor.copy_(self.tensors[part.key][part.box.slices])


def random_weights(model: ModelConfig, vocab_size: int = VOCAB) -> MemorySource:
    """Random tensors for an architecture, also where its initial weights are ones or zeros."""
    generator = torch.Generator().manual_seed(7)
    table = Table.of(architecture_of(model).rules, model_spec(model), vocab_size)
    return MemorySource(
        {
            key.name: (torch.randn(shape, generator=generator) * 0.1).bfloat16().float()
            for key, shape in table.shapes.items()
        }
    )


def config_for(model: ModelConfig, **changed: Any) -> dict[str, Any]:
    """The ``config.json`` of a model."""
    config = config_of(architecture_of(model), model, VOCAB, TokenIds(1, 2), "float32")
    return {**config, **changed}


def their_tensors(model: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """transformers' tensors for these weights, made by applying each rule literally."""
    source = random_weights(model)
    out = {}
    for link in Table.of(architecture_of(model).rules, model_spec(model), VOCAB).links:
        theirs = torch.empty(link.their_shape)
        link.as_ours(theirs).copy_(source.tensors[link.key][link.box.slices])
        out[link.theirs] = theirs.to(dtype)
    return out


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write a small model as `save_pretrained` does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
    return folder


def parameter_specs(model: ModelConfig, vocab_size: int = VOCAB) -> dict[str, tuple[int, ...]]:
    """Names and whole shapes of the parameters of our model."""
    context = thread_context(ThreadWorld(1), ProcessGrid(), 0)
    placement = replace(Placement.of(context, torch.float32), device=torch.device("meta"))
    gpt = GPT(Slice(model_spec(model), (vocab_size, vocab_size), placement))
    return {spec_of(p).name: spec_of(p).shape for p in gpt.parameters()}


def logits_of(source: Source, model: ModelConfig, tokens: Tensor, tp: int = 1, padded: int = VOCAB) -> Tensor:
    """Logits [b, s, vocabulary] of megazero's model with a source's weights on `tp` ranks."""
    world = ThreadWorld(tp)

    def work(rank: int) -> Tensor:
        context: ParallelContext = thread_context(world, ProcessGrid(tp=tp), rank)
        gpt = GPT(Slice(model_spec(model), (VOCAB, padded), Placement.of(context, torch.float32)))
        with torch.no_grad():
            source.read([*parts_of_parameters(gpt.parameters(), context), *choice_biases(gpt, model)])
            logits = gather_features(gpt(Batch(tokens)), context.tp)
        return logits[..., :VOCAB].transpose(0, 1)

    return world.run(work)[-1]


def choice_biases(gpt: GPT, model: ModelConfig) -> list[Part]:
    """Expert biases for each router."""
    routers = [module for module in gpt.modules() if isinstance(module, Router)]
    for router in routers if model.moe_router_enable_expert_bias else ():
        router.bias = torch.zeros(router.experts)
    return [
        Part.whole(Key(f"{router.name}.bias", ROUTER), router.bias)
        for router in routers
        if router.bias is not None
    ]
