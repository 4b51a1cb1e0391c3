"""Real hybrids of Megatron-Core on the CPU, with stand-ins for the kernels of mamba-ssm; their own processes.

``python -m tests.formats.megatron.core_hybrid save OUT`` saves a model in a folder of ranks and in the
distributed format, with the state of an AdamW, and beside them its tensors by name, tokens and logits.
``load FOLDER OUT RANK RANKS`` loads one with Core's own `dist_checkpointing.load` on a tensor-parallel rank
and saves it as that rank does in a folder of ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F

from tests.formats.megatron.core_distributed import (
    BUCKET,
    STEPS,
    named,
    optimizer_of,
    sharded,
    share,
    write,
)
from tests.formats.megatron.core_models import LLAMA, PADDED, VOCAB

PATTERN = "M*-MM-"
ARGUMENTS = {
    **LLAMA,
    "num_layers": len(PATTERN),
    "hidden_size": 24,
    "kv_channels": 4,
    "position_embedding_type": "none",
    "layernorm_epsilon": 1e-5,
    "is_hybrid_model": True,
    "hybrid_override_pattern": PATTERN,
    "mamba_state_dim": 8,
    "mamba_head_dim": 4,
    "mamba_num_groups": 2,
    "mamba_num_heads": 8,
    **{"consumed_train_samples": 28, "global_batch_size": 4, "micro_batch_size": 2, "lr": 1e-3},
    **{"min_lr": 0.0, "seed": 5, "optimizer": "adam", "train_iters": 20},
}


class GatedNorm(torch.nn.Module):
    """mamba_ssm's gated norm: y silu(z), normalized within each group of channels."""

    def __init__(self, width: int, eps: float, group_size: int, norm_before_gate: bool, device, dtype):
        super().__init__()
        assert not norm_before_gate
        self.eps, self.group = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(width, device=device, dtype=dtype))

    def forward(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        gated = (y * F.silu(z)).unflatten(-1, (-1, self.group))
        return (gated * (gated.square().mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(-2) * self.weight


def scan(x, dt, a, b, c, chunk, *, D, z, dt_bias, dt_softplus, **_):
    """mamba_ssm's scan as a recurrence: [batch, length, heads, channels]."""
    assert z is None
    assert dt_softplus
    dt = F.softplus(dt + dt_bias)
    b, c = (t.repeat_interleave(x.shape[2] // b.shape[2], 2) for t in (b, c))
    state, rows = x.new_zeros(*x.shape[:1], *x.shape[2:], b.shape[3]), []
    for t in range(x.shape[1]):
        decay = (dt[:, t] * a).exp()[..., None, None]
        state = state * decay + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        rows.append((state * c[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(rows, 1)


def install() -> None:
    """Put the stand-ins where Core imports mamba_ssm's functions."""
    names = ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton")
    inner = [f"{names[-1]}.{name}" for name in ("layernorm_gated", "ssd_combined", "selective_state_update")]
    modules = {name: ModuleType(name) for name in (*names, *inner)}
    sys.modules |= modules
    modules[inner[0]].RMSNorm = GatedNorm
    modules[inner[1]].mamba_chunk_scan_combined = scan
    modules[inner[1]].mamba_split_conv1d_scan_combined = None
    modules[inner[2]].selective_state_update = None
    if find_spec("triton") is None:  # kernels of Core for inference are written in it
        name = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"
        sys.modules[name] = kernels = ModuleType(name)
        kernels.tensor_get_slice_after = kernels.tensor_masked_update = kernels.tensor_merge = None


def build() -> torch.nn.Module:
    """A model of Core's own layers, with Transformer Engine's names of norms."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.mamba import MambaModel
    from megatron.core.ssm import mamba_block
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig, TransformerLayer, TransformerLayerSubmodules
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    mamba_block.TENorm = WrappedTorchNorm
    linear = (ColumnParallelLinear, RowParallelLinear)
    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(*linear))
    attention = SelfAttentionSubmodules(
        linear_qkv=linear[0], core_attention=DotProductAttention, linear_proj=linear[1]
    )
    causal = {"attn_mask_type": AttnMaskType.causal}
    layers = MambaStackSubmodules(
        mamba_layer=ModuleSpec(
            MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=WrappedTorchNorm,
                mixer=mixer,
                mamba_bda=get_bias_dropout_add,
                sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
            ),
        ),
        attention_layer=ModuleSpec(
            TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=WrappedTorchNorm,
                self_attention=ModuleSpec(SelfAttention, params=causal, submodules=attention),
                self_attn_bda=get_bias_dropout_add,
                sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
            ),
        ),
        mlp_layer=ModuleSpec(
            MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm,
                mlp=ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=linear[0], linear_fc2=linear[1])),
                mlp_bda=get_bias_dropout_add,
                sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
            ),
        ),
    )
    args = argparse.Namespace(**ARGUMENTS)
    own = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
    own += ("ffn_hidden_size", "normalization", "layernorm_epsilon", "add_bias_linear", "mamba_state_dim")
    own += ("mamba_head_dim", "mamba_num_groups", "mamba_num_heads", "hidden_dropout", "attention_dropout")
    config = TransformerConfig(
        **{name: getattr(args, name) for name in own},
        tensor_model_parallel_size=torch.distributed.get_world_size(),
        gated_linear_unit=True,
        activation_func=F.silu,
        use_mamba_mem_eff_path=False,
        use_cpu_initialization=True,
        is_hybrid_model=True,
    )
    return MambaModel(
        config,
        ModuleSpec(MambaStack, submodules=layers),
        vocab_size=PADDED,
        max_sequence_length=args.max_position_embeddings,
        hybrid_override_pattern=PATTERN,
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
    ).eval()


def save_rank(model: torch.nn.Module, folder: Path, rank: int, ranks: int, optimizer=None) -> Path:
    """Save a rank's file in a folder of ranks; return that folder."""
    place = folder / "iter_0000007" / f"mp_rank_{rank:02d}"
    place.mkdir(parents=True)
    said = {"tensor_model_parallel_size": ranks, "ddp_bucket_size": BUCKET}
    args = argparse.Namespace(**{**ARGUMENTS, **said})
    weights = model.state_dict_for_save_checkpoint()
    saved = {"args": args, "checkpoint_version": 3.0, "iteration": 7, "model": weights}
    torch.save({**saved, "optimizer": optimizer}, place / "model_optim_rng.pt")
    return place


def save(out: Path) -> None:
    """Save a model with random weights in both forms."""
    torch.manual_seed(3)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1))
        tokens = torch.randint(VOCAB, (2, 30))
        mask = torch.ones(30, 30, dtype=torch.bool).triu(1)[None, None]
        logits = model(tokens, torch.arange(30).expand(2, -1), mask)
    save_rank(model, out / "ranks", 0, 1)
    torch.save({"tokens": tokens, "logits": logits}, out / "logits.pt")
    optimizer = optimizer_of(model)
    folder = out / "distributed" / "iter_0000007"
    folder.mkdir(parents=True)
    common = {"args": argparse.Namespace(**ARGUMENTS), "checkpoint_version": 3.0, "iteration": 7}
    write({**common, **sharded(model, optimizer, loading=False)}, folder)
    (out / "distributed" / "latest_checkpointed_iteration.txt").write_text("7")
    inner = optimizer.optimizer
    state = {"groups": inner.param_groups, "state": inner.state_dict()["state"]}
    torch.save(named(model, state), out / "tensors.pt")
    save_rank(model, out / "whole", 0, 1, optimizer.state_dict())
    kept = {"optimizer": {"param_groups": [{"wd_mult": 1.0, "step": STEPS}]}}
    share(model, inner, save_rank(model, out / "shared", 0, 1, kept) / "distrib_optim.pt")


def load(folder: Path, out: Path, rank: int, ranks: int) -> None:
    """Load a model on one rank, and save what was loaded; with the optimizer's state on the only rank."""
    from megatron.core import dist_checkpointing

    torch.manual_seed(4)
    model = build()
    if ranks > 1:
        loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder))
        model.load_state_dict(loaded["model"])
        save_rank(model, out, rank, ranks)
        return
    optimizer = optimizer_of(model)
    loaded = dist_checkpointing.load(sharded(model, optimizer, loading=True), str(folder))
    model.load_state_dict(loaded["model"])
    state = {"groups": optimizer.optimizer.param_groups, "state": loaded["optimizer"]["state"]}
    state["state"].pop("common_step")
    torch.save(named(model, state), out)


def main(words: list[str]) -> None:
    """Run one of the two."""
    install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda: None
    get_cuda_rng_tracker().fork = contextlib.nullcontext
    rank, ranks = map(int, words[3:]) if words[0] == "load" else (0, 1)
    out = Path(words[2 if words[0] == "load" else 1])
    store = f"file://{out}.store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(ranks)
    if words[0] == "save":
        save(out)
    else:
        load(Path(words[1]), out, rank, ranks)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
