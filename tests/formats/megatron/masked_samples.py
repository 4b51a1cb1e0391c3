"""BERT checkpoints as Megatron-LM and Megatron-DeepSpeed write them, made without the code under test."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from megazero.config.tree.model import ModelConfig
from megazero.layers.placement import Placement
from megazero.models.bert import BERT as BERTModel
from megazero.models.chunk import Slice
from megazero.mpu.context import solo_context
from megazero.mpu.param_spec import spec_of
from megazero.spec.resolve import model_spec
from tests.formats.megatron.samples import (
    GPT2,
    OLD,
    PADDED,
    VOCAB,
    Layout,
    Weights,
    arguments_of,
    slice_of,
)

BERT = GPT2.model_copy(update={"family": "bert"})
WITHOUT_HEAD = BERT.model_copy(update={"bert_binary_head": False})
MODELS = {"head": BERT, "no head": WITHOUT_HEAD}
FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def random_weights(model: ModelConfig) -> Weights:
    """Random whole weights by megazero's global names."""
    placement = replace(Placement.of(solo_context(), torch.float32), device=torch.device("meta"))
    specs = [spec_of(p) for p in BERTModel(Slice(model_spec(model), (VOCAB, VOCAB), placement)).parameters()]
    generator = torch.Generator().manual_seed(5)
    return {spec.name: torch.randn(spec.shape, generator=generator) for spec in specs}


def whole_rank(model: ModelConfig, weights: Weights, tp: int, layout: Layout) -> Weights:
    """The tensors of a single rank, by the names of Core's local layers."""
    out = slice_of(model, weights, tp, layout)
    out = {name.replace("decoder.", "encoder.", 1): tensor for name, tensor in out.items()}
    bias = F.pad(weights["head.bias"], (0, PADDED - VOCAB), value=7.0)
    out["output_layer.bias"] = bias.chunk(layout.tp)[tp].clone()
    others = {
        "head.dense": "lm_head.dense",
        "head.norm": "lm_head.layer_norm",
        "pooler": "pooler.dense",
        "binary_head": "binary_head",
    }
    for ours, theirs in others.items():
        for kind in ("weight", "bias"):
            if f"{ours}.{kind}" in weights:
                out[f"{theirs}.{kind}"] = weights[f"{ours}.{kind}"]
    if "embedding.token_type.weight" in weights:
        out["embedding.tokentype_embeddings.weight"] = weights["embedding.token_type.weight"]
    return out


def stage_of(whole: Weights, model: ModelConfig, stage: int, layout: Layout) -> Weights:
    """One stage's tensors; its layers count from 0, and the last stage's head copies the embedding."""
    count = model.num_layers // layout.pp
    out = {}
    for name, tensor in whole.items():
        if name.startswith("encoder.layers."):
            number, rest = name.removeprefix("encoder.layers.").split(".", 1)
            if int(number) // count == stage:
                out[f"encoder.layers.{int(number) % count}.{rest}"] = tensor
        elif (stage == 0) if name.startswith("embedding.") else (stage == layout.pp - 1):
            out[name] = tensor
    if stage == layout.pp - 1 > 0 and "output_layer.weight" not in whole:
        out["output_layer.weight"] = whole["embedding.word_embeddings.weight"].clone()
    return out


def renamed(name: str, names: dict[str, str]) -> str:
    """A name with parts replaced."""
    for before, after in names.items():
        name = name.replace(before, after)
    return name


def old_names(stage: Weights) -> dict[str, Any]:
    """Tensors nested and named as in Megatron-LM before Core and in Megatron-DeepSpeed."""
    top: dict[str, Any] = {"language_model": {"embedding": {}, "encoder": {}, "pooler": {}}, "lm_head": {}}
    language = top["language_model"]
    for name, tensor in stage.items():
        module, _, rest = name.partition(".")
        if module == "encoder":
            language["encoder"][renamed(rest, OLD)] = tensor
        elif module == "embedding":
            table, _, kind = rest.partition(".")
            language["embedding"][table] = {kind: tensor}
        elif module == "pooler":
            language["pooler"][rest] = tensor
        elif module == "lm_head":
            top["lm_head"][rest.replace("layer_norm", "layernorm")] = tensor
        elif name == "output_layer.bias":
            top["lm_head"]["bias"] = tensor
        elif name == "output_layer.weight":
            top["word_embeddings_for_head"] = {"weight": tensor}
        else:
            top.setdefault("binary_head", {})[rest] = tensor
    return {name: each for name, each in top.items() if each}


def in_dialect(stage: Weights, layout: Layout) -> dict[str, Any]:
    """A stage's tensors in the names of the layout's dialect."""
    if layout.dialect == "old":
        return old_names(stage)
    names = FUSED if layout.dialect == "fused" else {}
    return {renamed(name, names): tensor for name, tensor in stage.items()}


def save_bert(run: Path, model: ModelConfig, weights: Weights, layout: Layout) -> Path:
    """Save a BERT as Megatron-LM does; return the checkpoint's folder."""
    folder = run / "iter_0000100"
    for tp in range(layout.tp):
        whole = whole_rank(model, weights, tp, layout)
        for pp in range(layout.pp):
            rank = folder / (f"mp_rank_{tp:02d}" if layout.pp == 1 else f"mp_rank_{tp:02d}_{pp:03d}")
            rank.mkdir(parents=True)
            saved = {
                "args": arguments_of(model, layout),
                "iteration": 100,
                "checkpoint_version": layout.version,
                "model": in_dialect(stage_of(whole, model, pp, layout), layout),
            }
            torch.save(saved, rank / "model_optim_rng.pt")
    (run / "latest_checkpointed_iteration.txt").write_text("100")
    return folder


def save_bert_deepspeed(run: Path, model: ModelConfig, weights: Weights, layout: Layout) -> Path:
    """Save a BERT as Megatron-DeepSpeed does, without a pipeline, which takes no BERT."""
    folder = run / "global_step100"
    folder.mkdir(parents=True)
    for tp in range(layout.tp):
        arguments = Namespace(**vars(arguments_of(model, layout)))
        saved = {
            "module": old_names(whole_rank(model, weights, tp, layout)),
            "args": arguments,
            "iteration": 100,
            "checkpoint_version": layout.version,
            "universal_checkpoint_info": {"original_vocab_size": VOCAB, "padded_vocab_size": PADDED},
        }
        torch.save(saved, folder / f"mp_rank_{tp:02d}_model_states.pt")
    (run / "latest").write_text(folder.name)
    return folder
