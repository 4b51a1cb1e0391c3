"""Real Megatron-Core models in its distributed format, on the CPU; a process of its own, as `core_models`.

``python -m tests.formats.megatron.core_distributed save OUT`` saves each model, with the state of an
AdamW, and beside it the same tensors by name. ``load FOLDER NAME OUT`` loads a model and such a state from a
distributed checkpoint with Megatron-Core's own `dist_checkpointing.load`, and saves them by name. ``folders
OUT`` saves some models in folders of ranks, their optimizers' state whole, or in a buffer with buckets.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.formats.megatron.core_models import (
    GPT2,
    LATENT,
    LLAMA,
    PADDED,
    build_bert,
    core_config,
    layer_spec,
    with_core,
)

MOE = {
    **LLAMA,
    "num_experts": 4,
    "moe_ffn_hidden_size": 22,
    "moe_router_topk": 2,
    "moe_shared_expert_intermediate_size": 14,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_layer_freq": 1,
}
MODELS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "normed-heads": {**LLAMA, "qk_layernorm": True, "softmax_scale": 0.5},
    "bert": {**GPT2, "binary_head": True},
    "latent": LATENT,
    "further": {**LLAMA, "mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3},
    "latent-further-experts": {
        **MOE,
        **{name: value for name, value in LATENT.items() if LLAMA.get(name, ...) != value},
        "mtp_num_layers": 1,
        "mtp_loss_scaling_factor": 0.3,
        "moe_layer_freq": [0, 1, 1],
    },
    "experts": MOE,
    "experts-in-some-layers": {**MOE, "moe_layer_freq": [0, 1, 1], "moe_router_enable_expert_bias": False},
}
FOLDERS = ("gpt2", "llama", "experts", "latent-further-experts")
STEPS, BUCKET = 3, 3000


def model_of(name: str) -> torch.nn.Module:
    """The model that Megatron-LM makes of a model's arguments."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

    args = argparse.Namespace(**MODELS[name])
    if "binary_head" in args:
        return build_bert(args)
    config = core_config(args)
    spec = layer_spec(args)
    if "num_experts" in MODELS[name] and args.num_experts:
        config.num_moe_experts = args.num_experts
        for field in (*(MOE.keys() - LLAMA.keys() - {"num_experts"}), "moe_layer_freq"):
            setattr(config, field, getattr(args, field))
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        if "multi_latent_attention" in args:
            spec.layer_specs[:] = map(with_core, spec.layer_specs)
    further = None
    if "mtp_num_layers" in args:
        config.mtp_num_layers = args.mtp_num_layers
        further = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    return GPTModel(
        config,
        spec,
        mtp_block_spec=further,
        vocab_size=PADDED,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )


def optimizer_of(model: torch.nn.Module):
    """Core's fp32 optimizer, after steps with random gradients."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    groups = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) == matrices], **facts}
        for matrices, facts in (
            (True, {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}),
            (False, {"wd_mult": 0.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}),
        )
    ]
    inner = torch.optim.AdamW(groups, lr=1e-3)
    for _ in range(STEPS):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        inner.step()
    optimizer = FP32Optimizer.__new__(FP32Optimizer)  # its constructor wants a GPU, for a scale of 1
    optimizer.optimizer, optimizer.config = inner, OptimizerConfig()
    optimizer.init_state_fn, optimizer.is_stub_optimizer = (lambda *_: None), False
    return optimizer


def sharded(model: torch.nn.Module, optimizer, *, loading: bool) -> dict:
    """The sharded state dict that Megatron-LM saves and loads."""
    weights = model.sharded_state_dict()
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, is_loading=loading)}


def named(model: torch.nn.Module, state: dict) -> dict[str, torch.Tensor]:
    """The tensors of a model and its optimizer, by the names in the model."""
    names = {id(p): name for name, p in model.named_parameters()}
    order = [names[id(p)] for group in state["groups"] for p in group["params"]]
    out = {f"weight/{name}": p.detach() for name, p in model.named_parameters()}
    out |= {f"bias/{name}": b for name, b in model.named_buffers() if name.endswith("expert_bias")}
    for number, values in state["state"].items():
        out |= {f"{kind}/{order[number]}": values[kind] for kind in ("exp_avg", "exp_avg_sq")}
    return out


def filled(name: str) -> torch.nn.Module:
    """A model with random weights, and biases of its routers."""
    torch.manual_seed(3)
    model = model_of(name)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for n, b in model.named_buffers() if "expert_bias" in n)):
            tensor.copy_(torch.randn_like(tensor) * 0.1)
    return model


def common_of(name: str) -> dict:
    """The content of ``common.pt``."""
    progress = {"consumed_train_samples": 28, "global_batch_size": 4, "micro_batch_size": 2, "lr": 1e-3}
    progress |= {"min_lr": 0.0, "seed": 5, "optimizer": "adam", "train_iters": 20}
    args = argparse.Namespace(**MODELS[name], **progress, ddp_bucket_size=BUCKET)
    return {"args": args, "checkpoint_version": 3.0, "iteration": 7}


def save_folders(out: Path) -> None:
    """Save models as folders of ranks: `NAME` with a whole optimizer, `NAME-shared` with a buffer."""
    for name in FOLDERS:
        model = filled(name)
        optimizer = optimizer_of(model)
        inner = optimizer.optimizer
        state = {"groups": inner.param_groups, "state": inner.state_dict()["state"]}
        torch.save(named(model, state), out / f"{name}.pt")
        for called in (name, f"{name}-shared"):
            folder = out / called / "iter_0000007" / "mp_rank_00"
            folder.mkdir(parents=True)
            weights = model.state_dict_for_save_checkpoint()
            kept = optimizer.state_dict()
            if called != name:
                share(model, inner, folder / "distrib_optim.pt")
                kept = {"optimizer": {"param_groups": [{"wd_mult": 1.0, "step": STEPS}]}}
            torch.save(
                {**common_of(name), "model": weights, "optimizer": kept}, folder / "model_optim_rng.pt"
            )
            (out / called / "latest_checkpointed_iteration.txt").write_text("7")


def share(model: torch.nn.Module, inner: torch.optim.Optimizer, path: Path) -> None:
    """Save an optimizer's state as Core's distributed optimizer does, in the buckets of Core's buffer."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    group = torch.distributed.group.WORLD
    groups = {"pg_collection": SimpleNamespace(tp=group, dp_cp=group)}
    asked = inspect.signature(_ParamAndGradBuffer).parameters
    buffer = _ParamAndGradBuffer(
        DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True),
        torch.float32,
        torch.float32,
        list(model.parameters()),
        group,
        BUCKET,
        {p: name for name, p in model.named_parameters()},
        1.0,
        list(range(len(list(model.parameters())))),
        False,
        **(groups if "pg_collection" in asked else {}),
    )
    assert len(buffer.buckets) > 3
    optimizer = DistributedOptimizer.__new__(DistributedOptimizer)  # its constructor wants a GPU
    optimizer.data_parallel_group = optimizer.data_parallel_group_gloo = group
    optimizer.ddp_config, optimizer.buffers = buffer.ddp_config, [buffer]
    optimizer.gbuf_ranges = [optimizer._build_gbuf_range_map(buffer)]
    optimizer._get_main_param_and_optimizer_states = lambda p: {
        "param": p.detach().flatten(),
        **{kind: inner.state[p][kind].flatten() for kind in ("exp_avg", "exp_avg_sq")},
    }
    optimizer.save_parameter_state(str(path))


def save(out: Path) -> None:
    """Save every model."""
    for name in MODELS:
        model = filled(name)
        optimizer = optimizer_of(model)
        folder = out / name / "iter_0000007"
        folder.mkdir(parents=True)
        common = common_of(name)
        write({**common, **sharded(model, optimizer, loading=False)}, folder)
        (out / name / "latest_checkpointed_iteration.txt").write_text("7")
        inner = optimizer.optimizer
        state = {"groups": inner.param_groups, "state": inner.state_dict()["state"]}
        torch.save(named(model, state), out / f"{name}.pt")


def write(state: dict, folder: Path) -> None:
    """Call Core's `dist_checkpointing.save` without its writer, which forks and needs a GPU."""
    import torch.distributed.checkpoint as dcp
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.strategies import torch as strategy

    tensors, common = save_preprocess(state)
    by_key, _, _ = strategy._replace_state_dict_keys_with_sharded_keys(tensors, True)
    planner = strategy.MCoreSavePlanner(flatten_state_dict=False, can_run_decentralized_global_plan=False)
    dcp.save(
        strategy.mcore_to_pyt_state_dict(by_key), storage_writer=dcp.FileSystemWriter(folder), planner=planner
    )
    torch.save(common, folder / "common.pt")
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def load(folder: Path, name: str, out: Path) -> None:
    """Load a model from a distributed checkpoint, and save what was loaded by name."""
    from megatron.core import dist_checkpointing

    torch.manual_seed(4)
    model = model_of(name)
    optimizer = optimizer_of(model)
    request = sharded(model, optimizer, loading=True)
    loaded = dist_checkpointing.load(request, str(folder))
    model.load_state_dict(loaded["model"])
    state = {"groups": optimizer.optimizer.param_groups, "state": loaded["optimizer"]["state"]}
    step = state["state"].pop("common_step")
    facts = {"step": step, "iteration": loaded["iteration"], "samples": loaded["args"].consumed_train_samples}
    torch.save({"tensors": named(model, state), **facts}, out)


def main(words: list[str]) -> None:
    """Run one of the two."""
    from megatron.core import parallel_state

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda: None
    store = f"file://{words[-1]}.store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    if words[0] == "save":
        save(Path(words[1]))
    elif words[0] == "folders":
        save_folders(Path(words[1]))
    else:
        load(Path(words[1]), words[2], Path(words[3]))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
