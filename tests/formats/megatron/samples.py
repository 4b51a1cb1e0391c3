"""Checkpoints as Megatron-LM and Megatron-DeepSpeed write them, made without the code under test."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.config.tree.model import ModelConfig
from megazero.layers.placement import Placement
from megazero.models.chunk import Slice
from megazero.models.gpt import GPT
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.param_spec import spec_of
from megazero.mpu.thread_group import ThreadWorld
from megazero.spec.resolve import model_spec

Weights = dict[str, Tensor]
VOCAB, PADDED = 101, 112

GPT2 = ModelConfig(
    num_layers=4,
    hidden_size=24,
    num_attention_heads=4,
    seq_length=16,
    max_position_embeddings=16,
    ffn_hidden_size=20,
    kv_channels=6,
    num_query_groups=None,
    norm_epsilon=3e-4,
    vocab_size=VOCAB,
    make_vocab_size_divisible_by=16,
)
LLAMA = GPT2.model_copy(
    update={
        "num_query_groups": 2,
        "kv_channels": 8,
        "position_embedding_type": "rope",
        "rotary_base": 500.0,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
    }
)

# Megatron-Core's names in those of before, layer by layer.
OLD = {
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}
OLDEST = {
    **OLD,
    "self_attention.linear_qkv": "attention.query_key_value",
    "self_attention.linear_proj": "attention.dense",
}
LATE_OLD = {**OLD, "input_layernorm": "input_norm", "pre_mlp_layernorm": "post_attention_norm"}
NORMS = (
    ("input_norm", "input_layernorm"),
    ("attention.q_norm", "self_attention.q_layernorm"),
    ("attention.k_norm", "self_attention.k_layernorm"),
    ("mlp_norm", "pre_mlp_layernorm"),
)
FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the content of a file."""
    saved = torch.load(path, weights_only=False)
    change(saved)
    torch.save(saved, path)


@dataclass(frozen=True)
class Layout:
    """The layout of a checkpoint: tensor-parallel ranks, stages, chunks per stage, dialect and version."""

    tp: int = 1
    pp: int = 1
    chunks: int = 1
    dialect: str = "core"
    version: float | None = 3.0
    arguments: dict[str, Any] = field(default_factory=dict)


def random_weights(model: ModelConfig) -> Weights:
    """Random whole weights by megazero's global names."""
    context = thread_context(ThreadWorld(1), ProcessGrid(), 0)
    placement = Placement.of(context, torch.float32)
    with torch.device("meta"):
        specs = [spec_of(p) for p in GPT(Slice(model_spec(model), (VOCAB, VOCAB), placement)).parameters()]
    generator = torch.Generator().manual_seed(5)
    return {spec.name: torch.randn(spec.shape, generator=generator) for spec in specs}


def arguments_of(model: ModelConfig, layout: Layout) -> Namespace:
    """Megatron's arguments for a model."""
    values = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.ffn_size,
        "seq_length": model.seq_length,
        "max_position_embeddings": model.positions,
        "layernorm_epsilon": model.norm_epsilon,
        "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by,
        "padded_vocab_size": PADDED,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "params_dtype": torch.bfloat16,
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
    }
    if model.gated:
        values |= {
            "swiglu": model.activation == "swiglu",
            "add_bias_linear": False,
            "normalization": "RMSNorm",
            "position_embedding_type": "rope",
            "rotary_base": 500,
            "group_query_attention": True,
            "num_query_groups": model.kv_heads,
        }
    return Namespace(**{**values, **layout.arguments})


def save_megatron(run: Path, model: ModelConfig, weights: Weights, layout: Layout, step: int = 100) -> Path:
    """Save a model as Megatron-LM does; return the checkpoint's folder."""
    folder = run / f"iter_{step:07d}"
    for tp in range(layout.tp):
        whole = slice_of(model, weights, tp, layout)
        for pp in range(layout.pp):
            chunks = [dialect_of(chunk_of(whole, model, pp, v, layout), layout) for v in range(layout.chunks)]
            names = ["model"] if layout.chunks == 1 else [f"model{v}" for v in range(layout.chunks)]
            saved = {
                "args": arguments_of(model, layout),
                "iteration": step,
                **dict(zip(names, chunks, strict=True)),
            }
            if layout.version is not None:
                saved["checkpoint_version"] = layout.version
            rank = folder / (f"mp_rank_{tp:02d}" if layout.pp == 1 else f"mp_rank_{tp:02d}_{pp:03d}")
            rank.mkdir(parents=True)
            torch.save(saved, rank / "model_optim_rng.pt")
    (run / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder


def save_deepspeed(run: Path, model: ModelConfig, weights: Weights, layout: Layout, step: int = 100) -> Path:
    """Save a model as Megatron-DeepSpeed does without a pipeline."""
    folder = run / f"global_step{step}"
    folder.mkdir(parents=True)
    for tp in range(layout.tp):
        chunk = chunk_of(slice_of(model, weights, tp, layout), model, 0, 0, layout)
        _save_rank_file(folder, tp, model, layout, step, dialect_of(chunk, layout))
    (run / "latest").write_text(folder.name)
    return folder


def save_layers(run: Path, model: ModelConfig, weights: Weights, layout: Layout, step: int = 100) -> Path:
    """Save a model as Megatron-DeepSpeed's pipeline does: modules without weights only take a number."""
    folder = run / f"global_step{step}"
    folder.mkdir(parents=True)
    for tp in range(layout.tp):
        modules: dict[int, dict] = {n: {} for n in range(model.num_layers + 6)}
        for name, tensor in slice_of(model, weights, tp, layout).items():
            for core, old in OLD.items():
                name = name.replace(core, old)
            if name.startswith("decoder.layers."):
                number, rest = name.removeprefix("decoder.layers.").split(".", 1)
                modules[3 + int(number)][rest] = tensor
            elif name.startswith("embedding."):
                modules[1][name.removeprefix("embedding.")] = tensor
            elif name.startswith("output_layer."):
                modules[model.num_layers + 5]["lm_head.weight"] = tensor
            else:
                modules[model.num_layers + 4][name.removeprefix("decoder.final_layernorm.")] = tensor
        for number, module in modules.items():
            if module:
                torch.save(module, folder / f"layer_{number:02d}-model_{tp:02d}-model_states.pt")
    for rank in range(layout.tp * layout.pp):
        _save_rank_file(folder, rank, model, layout, step, None)
    (run / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder


def _save_rank_file(
    folder: Path, rank: int, model: ModelConfig, layout: Layout, step: int, module: Any
) -> None:
    saved = {
        "module": module,
        "args": arguments_of(model, layout),
        "iteration": step,
        "checkpoint_version": layout.version,
        "universal_checkpoint_info": {"original_vocab_size": VOCAB, "padded_vocab_size": PADDED},
    }
    torch.save(saved, folder / f"mp_rank_{rank:02d}_model_states.pt")


def slice_of(model: ModelConfig, weights: Weights, tp: int, layout: Layout) -> Weights:
    """One tensor-parallel rank's tensors under Core's names, layers numbered over the whole model."""
    own = lambda tensor, dim: tensor.chunk(layout.tp, dim)[tp].clone()  # noqa: E731
    pad = lambda table: F.pad(table, (0, 0, 0, PADDED - VOCAB), value=7.0)  # noqa: E731
    out = {"embedding.word_embeddings.weight": own(pad(weights["embedding.word.weight"]), 0)}
    if "embedding.position.weight" in weights:
        out["embedding.position_embeddings.weight"] = weights["embedding.position.weight"]
    for suffix in ("weight", "bias"):
        if f"embedding.norm.{suffix}" in weights:
            out[f"embedding.word_embeddings.norm.{suffix}"] = weights[f"embedding.norm.{suffix}"]
    if "head.weight" in weights:
        out["output_layer.weight"] = own(pad(weights["head.weight"]), 0)
    for suffix in ("weight", "bias"):
        if f"final_norm.{suffix}" in weights:
            out[f"decoder.final_layernorm.{suffix}"] = weights[f"final_norm.{suffix}"]
    order = {None: (1, 0), 0.0: (1, 0), 1.0: (0, 2, 1)}.get(layout.version)
    for i in range(model.num_layers):
        ours, core = f"layers.{i}", f"decoder.layers.{i}"
        if f"{ours}.attention.softmax_offset" in weights:
            offset = own(weights[f"{ours}.attention.softmax_offset"], 0)
            out[f"{core}.self_attention.core_attention.softmax_offset"] = offset
        for suffix in ("weight", "bias"):
            for norm, name in NORMS:
                if f"{ours}.{norm}.{suffix}" in weights:
                    out[f"{core}.{name}.{suffix}"] = weights[f"{ours}.{norm}.{suffix}"]
            if f"{ours}.attention.qkv.{suffix}" not in weights:
                continue
            qkv = own(weights[f"{ours}.attention.qkv.{suffix}"], 0)  # [g/tp, s, d] or [g/tp, s, d, h]
            if order is not None:
                qkv = qkv.permute(*order, *range(len(order), qkv.dim()))
            columns = (model.hidden_size,) if suffix == "weight" else ()
            out[f"{core}.self_attention.linear_qkv.{suffix}"] = qkv.reshape(-1, *columns)
            if f"{ours}.mlp.up.{suffix}" not in weights:
                continue
            up = own(weights[f"{ours}.mlp.up.{suffix}"], 1 if model.gated else 0)
            out[f"{core}.mlp.linear_fc1.{suffix}"] = up.reshape(-1, *columns)
            for name, row in (
                ("self_attention.linear_proj", "attention.out"),
                ("mlp.linear_fc2", "mlp.down"),
            ):
                tensor = weights[f"{ours}.{row}.{suffix}"]
                out[f"{core}.{name}.{suffix}"] = own(tensor, 1) if suffix == "weight" else tensor
    return out


def chunk_of(whole: Weights, model: ModelConfig, stage: int, chunk: int, layout: Layout) -> Weights:
    """One model chunk's tensors; its layers count from 0. A tied head elsewhere copies the embedding."""
    count = model.num_layers // (layout.pp * layout.chunks)
    first = (chunk * layout.pp + stage) * count
    begins, ends = first == 0, first + count == model.num_layers
    out = {}
    for name, tensor in whole.items():
        if name.startswith("decoder.layers."):
            number, rest = name.removeprefix("decoder.layers.").split(".", 1)
            if first <= int(number) < first + count:
                out[f"decoder.layers.{int(number) - first}.{rest}"] = tensor
        elif begins if name.startswith("embedding.") else ends:
            out[name] = tensor
    if ends and not begins and "output_layer.weight" not in whole:
        out["output_layer.weight"] = whole["embedding.word_embeddings.weight"].clone()
    return out


def dialect_of(chunk: Weights, layout: Layout) -> dict[str, Any]:
    if layout.dialect in ("core", "fused"):
        renamed = FUSED if layout.dialect == "fused" else {}
        extra = {f"{name.rpartition('.')[0]}._extra_state": None for name in chunk if "linear" in name}
        return {_renamed(name, renamed): tensor for name, tensor in chunk.items()} | extra
    renamed = {"old": OLD, "oldest": OLDEST, "late old": LATE_OLD}[layout.dialect]
    decoder, model, copy = {}, {}, None
    for name, tensor in chunk.items():
        head, _, rest = name.partition(".")
        if head == "decoder":
            norm = "final_norm" if layout.dialect == "late old" else "final_layernorm"
            decoder[_renamed(rest, renamed).replace("final_layernorm", norm)] = tensor
        elif head == "embedding":
            module, _, suffix = rest.partition(".")
            model.setdefault("embedding", {})[module] = {suffix: tensor}
        elif layout.arguments.get("untie_embeddings_and_output_weights"):
            model["output_layer"] = {"weight": tensor}
        else:
            copy = {"weight": tensor}
    model["transformer" if layout.dialect == "oldest" else "encoder"] = decoder
    return {"language_model": model} | ({"word_embeddings_for_head": copy} if copy else {})


def _renamed(name: str, renames: dict[str, str]) -> str:
    for before, after in renames.items():
        name = name.replace(before, after)
    return name
