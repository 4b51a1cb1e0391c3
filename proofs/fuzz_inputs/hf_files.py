"""``config.json`` and ``model.safetensors.index.json``, read as `megazero checkpoint from-hf` reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from megazero.checkpoint.reader import CheckpointReader
from megazero.commands.checkpoint.hf import describe_import
from megazero.config.tree.model import ModelConfig
from megazero.formats.hf.convert import convert_from_hf
from proofs.fuzz_inputs.harness import Kind, Sample
from proofs.fuzz_inputs.mutate import of_json, of_lines
from tests.formats.hf.samples import GPT2, LLAMA, VOCAB, config_for, their_tensors

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
TIED_LLAMA = LLAMA.model_copy(update={"untie_embeddings_and_output_weights": False, "add_bias_linear": True})

# Our field -> (their field, what transformers assumes if it is missing).
_OF_GPT2: Mapping[str, tuple[str, Any]] = {
    "num_layers": ("n_layer", 12),
    "hidden_size": ("n_embd", 768),
    "num_attention_heads": ("n_head", 12),
    "max_position_embeddings": ("n_positions", 1024),
    "ffn_hidden_size": ("n_inner", None),
    "norm_epsilon": ("layer_norm_epsilon", 1e-5),
    "hidden_dropout": ("resid_pdrop", 0.1),
    "attention_dropout": ("attn_pdrop", 0.1),
    "init_method_std": ("initializer_range", 0.02),
}
_OF_LLAMA: Mapping[str, tuple[str, Any]] = {
    "num_layers": ("num_hidden_layers", 32),
    "hidden_size": ("hidden_size", 4096),
    "num_attention_heads": ("num_attention_heads", 32),
    "num_query_groups": ("num_key_value_heads", None),
    "kv_channels": ("head_dim", None),
    "ffn_hidden_size": ("intermediate_size", 11008),
    "max_position_embeddings": ("max_position_embeddings", 2048),
    "norm_epsilon": ("rms_norm_eps", 1e-6),
    "attention_dropout": ("attention_dropout", 0.0),
    "init_method_std": ("initializer_range", 0.02),
    "add_bias_linear": ("attention_bias", False),
}
_ACTIVATIONS: Mapping[str, str] = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu": "gelu_exact",
    "relu2": "squared_relu",
    "silu": "swiglu",
    "swish": "swiglu",
}


def _samples(folder: Path) -> list[Sample]:
    out = []
    for name, model in (("gpt2", GPT2), ("llama", LLAMA), ("tied llama", TIED_LLAMA)):
        tensors = their_tensors(model)
        files, weight_map = {}, {}
        for shard, names in zip(SHARDS, (list(tensors)[::2], list(tensors)[1::2]), strict=True):
            files[shard] = save({key: tensors[key] for key in names}, {"format": "pt"})
            weight_map |= dict.fromkeys(names, shard)
        size = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        files |= {CONFIG: _json(config_for(model)), INDEX: _json(index)}
        out.append(
            Sample(name, files, {CONFIG: (of_json, of_json, of_lines), INDEX: (of_json, of_json, of_lines)})
        )
    return out


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode()


def _read(folder: Path, sample: Sample) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The facts and the weights of the checkpoint that `from-hf` makes."""
    imported = convert_from_hf(folder, folder / "out")
    describe_import(imported).encode()
    with CheckpointReader(imported.folder) as reader:
        return dict(reader.facts), {key.name: reader.tensor(key) for key in reader.shapes}


def _compare(folder: Path, sample: Sample, found: tuple[dict[str, Any], dict[str, Tensor]]) -> str | None:
    config = json.loads((folder / CONFIG).read_bytes())
    facts, weights = found
    model = ModelConfig.model_validate(facts["model"])
    for field, value in _expected(config).items():
        got = getattr(model, field)
        if got != value or isinstance(got, bool) != isinstance(value, bool):
            return f"{field} is {got!r}, but should be {value!r}"
    ids = {role: config.get(f"{role}_token_id") for role in ("bos", "eos", "pad")}
    for role, value in ids.items():
        if type(value) is int and value >= 0 and facts["token_ids"][role] != value:
            return f"{role} is {facts['token_ids'][role]!r}, but should be {value!r}"
    return _difference_of_weights(folder, weights)


def _expected(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ours that a ``config.json`` determines, by the documentation of transformers."""
    named = config.get("architectures") or [
        {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}[config["model_type"]]
    ]
    is_llama = {"LlamaForCausalLM": True, "GPT2LMHeadModel": False}[named[0]]
    out = {}
    for field, (theirs, default) in (_OF_LLAMA if is_llama else _OF_GPT2).items():
        value = config.get(theirs, default)
        if value is not None:
            out[field] = value
    activation = (
        config.get("hidden_act", "silu") if is_llama else config.get("activation_function", "gelu_new")
    )
    out["activation"] = _ACTIVATIONS[activation]
    out["untie_embeddings_and_output_weights"] = not config.get("tie_word_embeddings", not is_llama)
    out["normalization"] = "RMSNorm" if is_llama else "LayerNorm"
    if is_llama:
        nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
        out["rotary_base"] = nested.get("rope_theta") or config.get("rope_theta", 10000.0)
    return out


def _difference_of_weights(folder: Path, weights: Mapping[str, Tensor]) -> str | None:
    """Whether the multiset of all values is what safetensors reads from the files that the index names."""
    index = json.loads((folder / INDEX).read_bytes())["weight_map"]
    theirs = []
    for name, shard in index.items():
        with safe_open(folder / shard, "pt") as file:
            theirs.append(file.get_tensor(name).flatten())
    ours = torch.cat([tensor.flatten() for tensor in weights.values()]).sort().values
    same = torch.equal(ours, torch.cat(theirs).float().sort().values)
    words = weights["embedding.word.weight"]
    if not same or words.shape[0] != VOCAB:
        return f"the values of {len(weights)} tensors are not those of the {len(theirs)} that the index names"
    return None


HUGGING_FACE = Kind("Hugging Face", _samples, _read, _compare)
