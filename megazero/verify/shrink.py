"""Make a user's configuration small enough for this machine, keeping what law 1 is about."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megazero.config.derive import PipelineShape
from megazero.config.heterogeneous.shapes import LayerShape, text_of
from megazero.config.steps import Progress
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.config import Config
from megazero.config.tree.model import ModelConfig
from megazero.mpu.grid import ProcessGrid
from megazero.optim.build import takes_signs
from megazero.spec.resolve import model_spec
from megazero.verify.sampling import SAMPLES, shrunk_metric

_WIDTH_OF_HEAD = 4
_MOST_SHAPES = 4  # layers of sizes of their own
# With these, no optimizer compresses anything in the few steps of a verification.
_LATE: Mapping[str, int] = MappingProxyType({"onebit_freeze_step": 1_000_000})
_ALL_EXACT: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "onebit-adam": _LATE,
        "onebit-lamb": _LATE,
        "zero-one-adam": MappingProxyType(
            dict.fromkeys(("zero_one_var_freeze_step", "zero_one_var_update_scaler"), 1_000_000)
        ),
    }
)


@dataclass(frozen=True)
class Shrunk:
    """A configuration made small.

    Attributes:
        config: the small configuration, in fp32.
        grid: the ranks that it runs on.
        notes: the parts of the configuration that had to be made smaller or different.
    """

    config: Config
    grid: ProcessGrid
    notes: tuple[str, ...]


def shrink(config: Config, data_parallel: int, most_ranks: int = 8) -> Shrunk:
    """Shrink to few, narrow layers, a short sequence, few micro-batches, and at most `most_ranks` ranks.

    The kind of model, every parallel axis larger than one, the ZeRO stage, schedule, recompute and sequence
    parallelism are kept. Axes are halved, the largest first, until the ranks fit, but not below two.
    """
    parallel = config.parallel
    sizes = {
        "tp": parallel.tensor_model_parallel_size,
        "pp": parallel.pipeline_model_parallel_size,
        "cp": parallel.context_parallel_size,
        "dp": min(data_parallel, 2 * config.zero.hpz_partition_size),
    }
    if config.model.num_experts:
        # Enough replicas for experts to be shared, if there are.
        sizes["dp"] = min(data_parallel, max(sizes["dp"], parallel.expert_model_parallel_size))
    wanted = dict(sizes)
    while math.prod(sizes.values()) > most_ranks and max(sizes.values()) > 2:
        largest = max(sizes, key=lambda axis: sizes[axis])
        sizes[largest] = max(2, sizes[largest] // 2)
    words = {"tp": "tensor", "pp": "pipeline", "cp": "context", "dp": "data"}
    notes = [f"{words[a]} parallel size {wanted[a]} -> {sizes[a]}" for a in sizes if sizes[a] != wanted[a]]
    tp, pp, cp, dp = sizes["tp"], sizes["pp"], sizes["cp"], sizes["dp"]
    ep, etp = _expert_sizes(config, tp, dp * cp)
    changes: dict[str, dict[str, Any]] = {
        "model": {**_model(config, tp, pp, cp), **_experts(config, tp, ep, etp)},
        "parallel": _parallel(config, tp, pp) | _context(config, cp) | _shared_experts(config, ep, etp),
        "zero": _zero(config, dp * cp),
        "offload": _offload(config),
        "batch": _batch(config, data_parallel, pp, dp),
        "optimizer": _optimizer(config),
        "precision": {"dtype": "fp32"},
        "curriculum": _curriculum(config, tp * cp),
        "data_sampling": {
            "curriculum_metrics": tuple(map(shrunk_metric, config.data_sampling.curriculum_metrics)),
            "curriculum_unit": "iters",
        },
        "skipping": _skipping(config, tp * cp),
        "distillation": {"kd_train_iters": None if config.distillation.kd_train_iters is None else 3},
        "training": {"train_iters": 100, "train_samples": None, "train_tokens": None},
    }
    if takes_signs(config.optimizer):
        changes["model"] |= {"add_bias_linear": False, "add_qkv_bias": False}
        notes.append("no biases: the gradient of the keys' bias is rounding alone, and its sign is taken")
    if config.optimizer.optimizer in _ALL_EXACT:
        notes.append(f"{config.optimizer.optimizer} sums exactly: compressed sums depend on the replicas")
    sections = {name: getattr(config, name).model_copy(update=update) for name, update in changes.items()}
    if ep != parallel.expert_model_parallel_size:
        notes.append(f"expert parallel size {parallel.expert_model_parallel_size} -> {ep}")
    if {config.zero.quantized_weights, config.zero.quantized_gradients} != {"none"}:
        notes.append("weights and gradients are sent as they are, not as codes")
    if config.data_sampling.curriculum_metrics:
        notes.append(f"samples are drawn by difficulty from {SAMPLES} random ones, with made-up indexes")
    if config.distillation.kd:
        notes.append("the teacher is a new one with twice the student's layers")
    inner = (sections["parallel"].hierarchical_context_parallel_sizes or (1, 1))[0]
    grid = ProcessGrid(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, etp=etp, cp_inner=inner)
    return Shrunk(config.model_copy(update=sections), grid, tuple(notes))


def _context(config: Config, cp: int) -> dict[str, Any]:
    """The settings of sequences that `cp` ranks share, with what attention sends in the few layers."""
    parallel, layers = config.parallel, max(2, PipelineShape.of(config).chunks_per_stage)
    blocks, types = parallel.hierarchical_context_parallel_sizes, parallel.cp_comm_type
    if blocks is not None:
        inner = math.gcd(blocks[0], cp)
        blocks = (inner, cp // inner)
    if len(types) > 1:
        layers *= parallel.pipeline_model_parallel_size
        types = tuple(types[layer % len(types)] for layer in range(layers))
    return {
        "context_parallel_size": cp,
        "cp_comm_type": types,
        "hierarchical_context_parallel_sizes": blocks,
    }


def _offload(config: Config) -> dict[str, Any]:
    soon = {"delayed_param_update_start": min(config.offload.delayed_param_update_start, 1)}
    path = {"path": config.offload.path and tempfile.gettempdir()}
    return path | (soon if config.offload.delayed_param_update else {})


def _zero(config: Config, replicas: int) -> dict[str, Any]:
    return {
        "bucket_size": 3000,
        "prefetch_size": 6000,
        "param_persistence_threshold": 40,
        "hpz_partition_size": math.gcd(config.zero.hpz_partition_size, replicas),
        "grad_reduce_dtype": "fp32",
        "grad_accumulation_dtype": "fp32",
        "main_params_dtype": "fp32",
        # Codes and narrow types do not promise to equal one process.
        "quantized_weights": "none",
        "quantized_gradients": "none",
        "quantization_block_size": 256,
        "quantization_rounding": "nearest",
        "node_size": 1,
    }


def _optimizer(config: Config) -> dict[str, Any]:
    # The run is only a few steps long: the learning rate has no lengths and stays what it is.
    fields = type(config.optimizer).model_fields.items()
    changes: dict[str, Any] = {name: field.default for name, field in fields if name.startswith("lr_")}
    changes |= {"lr": 1e-2, "adam_eps": 1e-4, "clip_grad": 0.5, "lr_decay_style": "constant"}
    if config.optimizer.optimizer == "adagrad":
        changes["adagrad_eps"] = 1e-4
    return {**changes, **_ALL_EXACT.get(config.optimizer.optimizer, {})}


def _curriculum(config: Config, tp: int) -> dict[str, Any]:
    """A curriculum of half of the sequence for two steps, if it is to grow at all."""
    if config.curriculum.seqlen_schedule == "none":
        return {}
    return {
        **{name: field.default for name, field in type(config.curriculum).model_fields.items()},
        "seqlen_schedule": "fixed_discrete",
        "seqlen_difficulty": (4 * tp, 8 * tp),
        "seqlen_max_step": (2,),
        "seqlen_kind": config.curriculum.seqlen_kind,
    }


def _skipping(config: Config, tp: int) -> dict[str, Any]:
    """The settings of methods that skip layers or their tokens, made to take effect within a few steps.

    The second layer sees half of the tokens for three steps; layers are left out soon. Methods that the
    configuration does not use stay off.
    """
    settings = config.skipping
    changes: dict[str, Any] = {}
    if settings.random_ltd:
        changes |= {
            "random_ltd_layer_id": (1,),
            "random_ltd_min_value": 4 * tp,
            "random_ltd_max_value": None,
            "random_ltd_require_steps": 4,
            "random_ltd_seq_per_step": 4 * tp,
            "random_ltd_layer_num": None,
            "random_ltd_total_layer_num": None,
        }
    if settings.progressive_layer_drop:
        changes |= {"pld_theta": min(0.5, settings.pld_theta), "pld_gamma": 1.0}
    return changes


def _expert_sizes(config: Config, tp: int, dp: int) -> tuple[int, int]:
    """The ranks that share a layer's experts and those that share each expert, lowered to fit a stage."""
    parallel = config.parallel
    etp = min(parallel.expert_tensor_parallel_size or tp, tp * dp)
    while tp * dp % etp:
        etp -= 1
    ep = parallel.expert_model_parallel_size
    while ep > 1 and (ep > tp * dp // etp or tp * dp // etp % ep):
        ep = max(1, ep // 2)
    return ep, etp


def _shared_experts(config: Config, ep: int, etp: int) -> dict[str, Any]:
    given = config.parallel.expert_tensor_parallel_size
    sizes = {"expert_model_parallel_size": ep}
    return sizes if given is None else {**sizes, "expert_tensor_parallel_size": etp}


def _experts(config: Config, tp: int, ep: int, etp: int) -> dict[str, Any]:
    """Few and narrow experts of the same kind, in all layers that have them or in every N-th."""
    model = config.model
    if not model.num_experts:
        return {}
    k, groups = model.moe_router_topk, model.moe_router_num_groups
    least = ep * -(-max(k, 2 * groups if groups else k, 4) // ep)
    if groups:
        least = math.lcm(least, groups)
    pattern = model.moe_layer_freq
    return {
        "num_experts": (least,),
        "moe_layer_freq": (1,) if pattern is not None and len(pattern) > 1 else pattern,
        "expert_interval": None if model.expert_interval is None else min(2, model.expert_interval),
        "moe_ffn_hidden_size": None if model.moe_ffn_hidden_size is None else 8 * etp,
        "moe_n_hash_layers": min(model.moe_n_hash_layers, 2 if model.expert_interval else 1),
        "moe_min_capacity": min(1, model.moe_min_capacity),
        "moe_shared_expert_intermediate_size": (
            None if model.moe_shared_expert_intermediate_size is None else 16 * tp
        ),
    }


def _model(config: Config, tp: int, pp: int, cp: int) -> dict[str, Any]:
    model = config.model
    grouped = any(attention.groups != attention.heads for attention in model_spec(model).attentions())
    heads = 2 * tp if grouped else tp * (1 if tp > 1 else 2)
    if cp > 1:  # enough for ranks to exchange
        heads = max(heads, 2 * tp * cp)
    kinds = "".join(dict.fromkeys(model.layer_kinds or ""))
    shapes = tuple(dict.fromkeys(model.layer_shapes or ()))[:_MOST_SHAPES]
    layers = max(2, pp * PipelineShape.of(config).chunks_per_stage, len(kinds), len(shapes))
    return {
        **_layers(model, layers),
        **_letters(kinds, layers, tp),
        **_shapes(model, shapes, layers, heads, tp),
        "num_attention_heads": heads,
        "num_query_groups": tp if grouped else None,
        "kv_channels": None,
        "hidden_size": heads * _WIDTH_OF_HEAD,
        "ffn_hidden_size": 24 * tp,
        "seq_length": 8 * tp * cp,
        "t5_decoder_seq_length": None if model.t5_decoder_seq_length is None else 4 * tp,
        "max_position_embeddings": None,
        **_windows(model),
        **_latent(model),
        "vocab_size": 61,
        "extra_vocab_size": 0,
        "make_vocab_size_divisible_by": 4,
        "pad_vocab_size_to": None,
        "init_method_std": 0.1,
        **_blocks(config),
    }


def _letters(kinds: str, layers: int, tp: int) -> dict[str, Any]:
    """Layers of each kind that a hybrid model has, in turn, with few heads and small states."""
    if not kinds:
        return {}
    return {
        "hybrid_layer_pattern": (kinds * layers)[:layers],
        "hybrid_attention_ratio": 0.0,
        "hybrid_mlp_ratio": 0.0,
        "mamba_state_dim": 4,
        "mamba_head_dim": 4,
        "mamba_num_groups": tp,
        "mamba_num_heads": 2 * tp,
    }


def _shapes(
    model: ModelConfig, shapes: tuple[LayerShape, ...], layers: int, heads: int, tp: int
) -> dict[str, Any]:
    """Layers of some of the shapes that a model has, in turn, with few heads and small widths."""
    if not shapes:
        return {}
    widths = sorted({shape.width for shape in shapes} - {0})
    small = [
        LayerShape(
            shape.groups and (tp if shape.groups < model.num_attention_heads else heads),
            shape.width and 8 * tp * (1 + widths.index(shape.width)),
        )
        for shape in shapes
    ]
    of_layers = tuple(itertools.islice(itertools.cycle(small), layers))
    return {"heterogeneous_layers_config_encoded_json": text_of(of_layers)}


def _layers(model: ModelConfig, count: int) -> dict[str, Any]:
    """Reduce to `count` layers; an encoder-decoder gets half in each stack, and at least 2."""
    if model.t5_decoder_layers is None:
        return {"num_layers": count}
    count = max(4, count)
    return {"num_layers": count, "t5_encoder_layers": count // 2, "t5_decoder_layers": count - count // 2}


def _blocks(config: Config) -> dict[str, Any]:
    """Blocks of one token, and as few of them in each place as leave the layout its kind."""
    model = config.model
    if not model.is_sparse:
        return {}
    patterns, sliding = (
        model.sparse_num_different_global_patterns,
        model.sparse_num_sliding_window_blocks,
    )
    return {
        "sparse_block": 1,
        "sparse_num_local_blocks": 4,
        "sparse_num_global_blocks": 1,
        "sparse_num_different_global_patterns": min(4, patterns),
        "sparse_num_random_blocks": min(2, model.sparse_num_random_blocks),
        "sparse_local_window_blocks": tuple(min(4, w) for w in model.sparse_local_window_blocks),
        "sparse_global_block_indices": (0,),
        "sparse_global_block_end_indices": (2,) if model.sparse_global_block_end_indices else (),
        "sparse_num_sliding_window_blocks": min(3, sliding),
    }


def _latent(model: ModelConfig) -> dict[str, Any]:
    """Few channels, of other numbers each, and at most two further tokens."""
    few = {} if model.mtp_num_layers is None else {"mtp_num_layers": min(2, model.mtp_num_layers)}
    if not model.multi_latent_attention:
        return few
    narrow = None if model.q_lora_rank is None else 7
    widths = {"kv_lora_rank": 6, "qk_head_dim": 3, "qk_pos_emb_head_dim": 4, "v_head_dim": 5}
    return few | {"q_lora_rank": narrow, **widths}


def _windows(model: ModelConfig) -> dict[str, Any]:
    """A window that hides something of so short a sequence, in the first layer if not in all.

    Where some layers have no rotary positions, the second has none.
    """
    rotated = {} if model.no_rope_freq is None else {"no_rope_freq": (2,)}
    if model.window_size is None:
        return rotated
    every = model.window_attn_skip_freq is None
    return rotated | {
        "window_size": tuple(min(side, 3) for side in model.window_size),
        "window_attn_skip_freq": None if every else (2,),
        "window_sink_tokens": min(1, model.window_sink_tokens),
    }


def _parallel(config: Config, tp: int, pp: int) -> dict[str, Any]:
    shape = PipelineShape.of(config)
    virtual = shape.chunks_per_stage if shape.kind == "interleaved" else 1
    partition = config.parallel.pipeline_partition
    grouped = config.parallel.microbatch_group_size_per_virtual_pipeline_stage is not None
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": virtual if virtual > 1 else None,
        "microbatch_group_size_per_virtual_pipeline_stage": 2 * pp if grouped else None,
        "pipeline_partition": "uniform" if partition[0].isdigit() or "type:" in partition else partition,
    }


def _batch(config: Config, data_parallel: int, pp: int, dp: int) -> dict[str, Any]:
    micro_batch = min(2, config.batch.micro_batch_size)
    accumulated = training_plan_of(config, data_parallel).at(Progress()).micro_batches
    count = 2 * pp if pp > 1 else min(4, accumulated)
    return {
        "micro_batch_size": micro_batch,
        "global_batch_size": micro_batch * count * dp,
        "rampup_batch_size": None,
        "step_batch_size_schedule": (),
    }
