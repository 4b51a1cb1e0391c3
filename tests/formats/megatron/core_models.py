"""Real Megatron-Core models on the CPU: ``python -m tests.formats.megatron.core_models OUT`` saves them
and their logits. A process of its own, as Megatron needs a process group of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from pathlib import Path

import torch

warnings.simplefilter("ignore")  # about accelerators it would like to have

VOCAB, PADDED = 101, 128
COMMON = {
    "num_layers": 3,
    "seq_length": 31,
    "max_position_embeddings": 31,
    "make_vocab_size_divisible_by": 128,
    "padded_vocab_size": PADDED,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "layernorm_epsilon": 3e-4,
    "num_query_groups": 1,  # Megatron's default, which says nothing unless there are groups
    "group_query_attention": False,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "num_experts": None,
    "openai_gelu": False,
    "squared_relu": False,
    "qk_layernorm": False,
    "softmax_scale": None,
    "tokenizer_type": "GPT2BPETokenizer",
    "params_dtype": torch.float32,
}
GPT2 = {
    **COMMON,
    "hidden_size": 42,
    "num_attention_heads": 6,
    "kv_channels": 7,
    "ffn_hidden_size": 74,
    "position_embedding_type": "learned_absolute",
    "rotary_percent": 1.0,
    "rotary_base": 10000,
    "normalization": "LayerNorm",
    "swiglu": False,
    "bias_gelu_fusion": True,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "untie_embeddings_and_output_weights": False,
}
LLAMA = {
    **COMMON,
    "hidden_size": 36,
    "num_attention_heads": 6,
    "num_query_groups": 2,
    "group_query_attention": True,
    "kv_channels": 10,
    "ffn_hidden_size": 58,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_base": 500,
    "normalization": "RMSNorm",
    "swiglu": True,
    "bias_gelu_fusion": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "untie_embeddings_and_output_weights": True,
}
LATENT = {
    **LLAMA,
    "num_query_groups": 1,
    "group_query_attention": False,
    "kv_channels": 6,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "rope_type": None,
    "rotary_scaling_factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
MODELS = {
    "latent": LATENT,
    "latent-queries-of-hidden-states": {
        **LATENT,
        "q_lora_rank": None,
        "rope_type": "rope",
        "mscale_all_dim": 0.0,
    },
    "gpt2": GPT2,
    "gpt2-exact-gelu": {**GPT2, "bias_gelu_fusion": False, "untie_embeddings_and_output_weights": True},
    "llama": LLAMA,
    "llama-qkv-biases": {**LLAMA, "add_qkv_bias": True},
    "llama-partly-rotated": {**LLAMA, "rotary_percent": 0.6, "untie_embeddings_and_output_weights": False},
    "llama-normed-heads": {**LLAMA, "qk_layernorm": True, "softmax_scale": 0.5},
    "llama-pairs-of-neighbours": {**LLAMA, "rotary_percent": 0.6, "rotary_interleaved": True},
    "llama-some-unrotated": {**LLAMA, "no_rope_freq": [0, 1, 0]},
    "gpt2-normed-heads": {**GPT2, "qk_layernorm": True},
}
BERTS = {
    "bert": GPT2,
    "bert-exact-gelu": {**GPT2, "bias_gelu_fusion": False, "untie_embeddings_and_output_weights": True},
    "bert-without-binary-head": GPT2,
}
LENGTHS = (30, 17)


def main(out: Path) -> None:
    """Save each model in Megatron-LM's `torch` format, and beside it tokens [b, s] and logits [b, s, v].

    A BERT's second sample is padded; its logits of the binary head are saved too.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.cuda.current_device = lambda: torch.device("cpu")  # where it puts rotary frequencies
    get_cuda_rng_tracker().fork = contextlib.nullcontext  # it keeps CUDA's random states, for dropout
    store = f"file://{out}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    for name, arguments in {**MODELS, **BERTS}.items():
        torch.manual_seed(3)
        build_it = build_bert if name in BERTS else build
        model = build_it(
            argparse.Namespace(**arguments, binary_head=not name.endswith("without-binary-head"))
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.1 + (parameter.dim() == 1))
        tokens = torch.randint(VOCAB, (2, 30))
        with torch.no_grad():
            found = ask_bert(model, tokens) if name in BERTS else ask(model, tokens)
        folder = out / name / "iter_0000007" / "mp_rank_00"
        folder.mkdir(parents=True)
        saved = {
            "args": argparse.Namespace(**arguments),
            "checkpoint_version": 3.0,
            "iteration": 7,
            "model": model.state_dict_for_save_checkpoint(),
        }
        torch.save(saved, folder / "model_optim_rng.pt")
        (out / name / "latest_checkpointed_iteration.txt").write_text("7")
        torch.save({"tokens": tokens, **found}, out / f"{name}.pt")
    torch.distributed.destroy_process_group()


def ask(model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """A GPT's logits."""
    mask = torch.ones(30, 30, dtype=torch.bool).triu(1)[None, None]
    return {"logits": model(tokens, torch.arange(30).expand(2, -1), mask)}


def ask_bert(model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """A BERT's logits of both heads, with the token types of the input."""
    real = (torch.arange(30) < torch.tensor(LENGTHS)[:, None]).long()
    types = ((torch.arange(30) >= 9) * real).long()
    logits, order = model(tokens, real, tokentype_ids=types if model.add_binary_head else None)
    return {"logits": logits, "types": types, **({} if order is None else {"order": order})}


def build_bert(args: argparse.Namespace) -> torch.nn.Module:
    """The BERT that Megatron-LM makes of these arguments."""
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    return BertModel(
        core_config(args),
        num_tokentypes=2 if args.binary_head else 0,
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=PADDED,
        max_sequence_length=args.max_position_embeddings,
        add_binary_head=args.binary_head,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    ).eval()


def core_config(args: argparse.Namespace):
    """Core's configuration of a model's layers."""
    import torch.nn.functional as F
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    latent = {}
    if getattr(args, "multi_latent_attention", False):
        latent = {name: getattr(args, name) for name in LATENT.keys() - LLAMA.keys()}
        latent |= {"rope_type": args.rope_type or "yarn", "rotary_base": args.rotary_base}
    return (MLATransformerConfig if latent else TransformerConfig)(
        **latent,
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        kv_channels=args.kv_channels,
        ffn_hidden_size=args.ffn_hidden_size,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization=args.normalization,
        layernorm_epsilon=args.layernorm_epsilon,
        gated_linear_unit=args.swiglu,
        activation_func=F.silu if args.swiglu else F.gelu,
        bias_activation_fusion=args.bias_gelu_fusion and not args.swiglu,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        qk_layernorm=args.qk_layernorm,
        softmax_scale=args.softmax_scale,
        use_cpu_initialization=True,
        **{name: getattr(args, name) for name in ("rotary_interleaved", "no_rope_freq") if name in args},
    )


class LatentCore(torch.nn.Module):
    """Attention with fewer channels of values than of keys, which Core has in Transformer Engine only."""

    def __init__(self, *, softmax_scale: float, **_: object):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, attention_mask, **_: object) -> torch.Tensor:
        """[s, b, n, d] -> [s, b, n e]"""
        scores = torch.einsum("sbnd,tbnd->bnst", query, key) * self.scale
        shares = scores.masked_fill(attention_mask, -torch.inf).softmax(-1)
        return torch.einsum("bnst,tbne->sbne", shares, value).flatten(2)


def layer_spec(args: argparse.Namespace):
    """The specification of a model's layers without Transformer Engine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    latent = getattr(args, "multi_latent_attention", False)
    spec = get_gpt_layer_local_spec(
        normalization=args.normalization, qk_layernorm=args.qk_layernorm, multi_latent_attention=latent
    )
    return with_core(spec) if latent else spec


def with_core(spec):
    """The specification with attention that runs on a CPU."""
    from megatron.core.transformer import multi_latent_attention

    # Core 0.16 asks whether layers are Transformer Engine's even if it is not there.
    if not isinstance(getattr(multi_latent_attention, "TELinear", None), type):
        multi_latent_attention.TELinear = LatentCore
    spec.submodules.self_attention.submodules.core_attention = LatentCore
    return spec


def build(args: argparse.Namespace) -> torch.nn.Module:
    """The GPT that Megatron-LM makes of these arguments."""
    from megatron.core.models.gpt import GPTModel

    return GPTModel(
        core_config(args),
        layer_spec(args),
        vocab_size=PADDED,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    ).eval()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
