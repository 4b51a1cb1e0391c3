"""The defaults of Megatron-LM (August 2026) and Megatron-DeepSpeed (July 2025), and what follows for ours.

A default is what a launch of `pretrain_gpt.py` has when the flag is left out, after the parser's own
completion: `--split` is None to Megatron-LM's parser and `969, 30, 1` to its datasets.
"""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from megazero.config import parse_config
from megazero.config.defaults import DECISIONS
from megazero.config.fields import FIELD_BY_PATH, FIELDS

NO = "no such flag"
REQUIRED = "required"

# setting -> its default in Megatron-LM and in Megatron-DeepSpeed. Off is False whatever the flag is called.
FACTS: dict[str, tuple[Any, Any]] = {
    "model.num_layers": (REQUIRED, REQUIRED),
    "model.hidden_size": (REQUIRED, REQUIRED),
    "model.num_attention_heads": (REQUIRED, REQUIRED),
    "model.seq_length": (REQUIRED, REQUIRED),
    "model.max_position_embeddings": (REQUIRED, REQUIRED),
    "model.ffn_hidden_size": (None, None),
    "model.num_query_groups": (None, None),
    "model.kv_channels": (None, None),
    "model.position_embedding_type": ("learned_absolute", "learned_absolute"),
    "model.rotary_percent": (1.0, 1.0),
    "model.rotary_base": (10000, 10000),
    "model.normalization": ("LayerNorm", "LayerNorm"),
    "model.norm_epsilon": (1e-5, 1e-5),
    "model.activation": ("gelu", "gelu"),  # fused with the bias: the tanh form
    "model.add_bias_linear": (True, True),
    "model.add_qkv_bias": (False, NO),
    "model.untie_embeddings_and_output_weights": (False, False),
    "model.hidden_dropout": (0.1, 0.1),
    "model.attention_dropout": (0.1, 0.1),
    "model.init_method_std": (0.02, 0.02),
    "model.vocab_size": (None, None),
    "model.make_vocab_size_divisible_by": (128, 128),
    "model.fp32_residual_connection": (False, False),
    "model.apply_residual_connection_post_layernorm": (False, False),
    "model.bert_binary_head": (True, True),
    "model.num_experts": ((), ()),  # None and 1, which both mean a dense model
    "model.moe_layer_freq": ((1,), NO),
    "model.expert_interval": (NO, 2),
    "model.moe_ffn_hidden_size": (None, NO),
    "model.mlp_type": (NO, "standard"),
    "model.moe_shared_expert_intermediate_size": (None, NO),
    "model.moe_shared_expert_gate": (False, NO),
    "model.moe_router_topk": (2, 1),
    "model.moe_router_score_function": ("softmax", NO),
    "model.moe_router_pre_softmax": (False, NO),
    "model.moe_router_num_groups": (None, NO),
    "model.moe_router_group_topk": (None, NO),
    "model.moe_router_topk_scaling_factor": (None, NO),
    "model.moe_router_enable_expert_bias": (False, NO),
    "model.moe_router_bias_update_rate": (1e-3, NO),
    "model.moe_router_load_balancing_type": (("aux_loss",), NO),
    "model.moe_aux_loss_coeff": ((0.0,), (0.1,)),
    "model.moe_z_loss_coeff": (0.0, NO),  # None to the parser: no such loss
    "model.moe_input_jitter_eps": (0.0, NO),  # None to the parser: no jitter
    "model.moe_router_sampling": (NO, "second"),
    "model.moe_expert_capacity_factor": (None, 1.0),
    "model.moe_eval_capacity_factor": (NO, 1.0),
    "model.moe_min_capacity": (NO, 4),
    "model.moe_token_drop_policy": ("probs", NO),
    "model.moe_pad_expert_input_to_capacity": (False, NO),
    "parallel.tensor_model_parallel_size": (1, 1),
    "parallel.pipeline_model_parallel_size": (1, 1),
    "parallel.num_layers_per_virtual_pipeline_stage": (None, None),
    "parallel.num_virtual_stages_per_pipeline_rank": (None, NO),
    "parallel.context_parallel_size": (1, 1),
    "parallel.expert_model_parallel_size": (1, 1),
    "parallel.expert_tensor_parallel_size": ("the tensor-parallel size", 1),
    "parallel.moe_token_dispatcher_type": ("allgather", NO),
    "parallel.sequence_parallel": (False, False),
    "parallel.distributed_backend": ("nccl", "nccl"),
    "parallel.distributed_timeout_minutes": (10, 10),
    "zero.stage": (0, 1),
    "zero.bucket_size": (None, 0),
    "zero.overlap_grad_reduce": (False, NO),
    "zero.overlap_param_gather": (False, NO),
    "zero.grad_reduce_dtype": ("the model's", "the model's"),
    "zero.grad_accumulation_dtype": ("the model's", "the model's"),
    "zero.main_params_dtype": ("fp32", NO),
    "batch.micro_batch_size": (REQUIRED, REQUIRED),
    "batch.global_batch_size": (None, None),
    "batch.rampup_batch_size": (None, None),
    "optimizer.optimizer": ("adam", "adam"),
    "optimizer.lr": (REQUIRED, REQUIRED),
    "optimizer.min_lr": (0.0, 0.0),
    "optimizer.weight_decay": (0.01, 0.01),
    "optimizer.adam_beta1": (0.9, 0.9),
    "optimizer.adam_beta2": (0.999, 0.999),
    "optimizer.adam_eps": (1e-8, 1e-8),
    "optimizer.sgd_momentum": (0.9, 0.9),
    "optimizer.lion_beta1": (0.95, NO),
    "optimizer.lion_beta2": (0.98, NO),
    "optimizer.muon_momentum": (0.9, NO),
    "optimizer.muon_nesterov": (False, NO),
    "optimizer.muon_coefficient_type": ("quintic", NO),
    "optimizer.muon_num_ns_steps": (5, NO),
    "optimizer.muon_scale_mode": ("spectral", NO),
    "optimizer.muon_extra_scale_factor": (1.0, NO),
    "optimizer.muon_split_qkv": (True, NO),
    "optimizer.muon_scalar_optimizer": ("adam", NO),
    "optimizer.clip_grad": (1.0, 1.0),
    "optimizer.lr_decay_style": ("linear", "linear"),
    "optimizer.lr_decay_iters": (None, None),
    "optimizer.lr_decay_samples": (None, None),
    "optimizer.lr_decay_tokens": (NO, None),
    "optimizer.lr_warmup_iters": (0, 0),
    "optimizer.lr_warmup_samples": (0, 0),
    "optimizer.lr_warmup_tokens": (NO, 0),  # None to the parser: no warmup in tokens
    "optimizer.lr_warmup_fraction": (None, None),
    "optimizer.lr_warmup_init": (0.0, NO),
    "optimizer.lr_wsd_decay_style": ("exponential", NO),
    "optimizer.lr_wsd_decay_iters": (None, NO),
    "optimizer.lr_wsd_decay_samples": (None, NO),
    "optimizer.start_weight_decay": (None, None),
    "optimizer.end_weight_decay": (None, None),
    "optimizer.weight_decay_incr_style": ("constant", "constant"),
    "precision.dtype": ("fp32", "fp32"),
    "precision.loss_scale": (None, None),
    "precision.initial_loss_scale": (2**32, 2**32),
    "precision.min_loss_scale": (1.0, 1.0),
    "precision.loss_scale_window": (1000, 1000),
    "precision.hysteresis": (2, 2),
    "precision.fp8_format": ("none", "none"),  # None to the parsers, and off
    "precision.fp8_recipe": ("delayed", NO),
    "precision.fp8_margin": (0, 0),
    "precision.fp8_amax_history_len": (1, 1),
    "precision.fp8_amax_compute_algo": ("most_recent", "most_recent"),
    "precision.first_last_layers_bf16": (False, NO),
    "precision.num_layers_at_start_in_bf16": (1, NO),
    "precision.num_layers_at_end_in_bf16": (1, NO),
    "recompute.granularity": ("none", "none"),  # None to the parsers
    "recompute.method": (None, None),
    "recompute.num_layers": (None, 1),
    "recompute.partition_activations": (False, False),
    "recompute.offload": (NO, False),
    "recompute.logits": (NO, False),
    "tokenizer.tokenizer_type": ("GPT2BPETokenizer", "GPT2BPETokenizer"),  # the script's own default
    "tokenizer.vocab_file": (None, None),
    "tokenizer.merge_file": (None, None),
    "tokenizer.tokenizer_model": (None, None),
    "tokenizer.vocab_extra_ids": (0, 0),
    "data.data_path": ((), ()),
    "data.train_data_path": ((), ()),
    "data.valid_data_path": ((), ()),
    "data.test_data_path": ((), ()),
    "data.split": ("969, 30, 1", "969, 30, 1"),
    "data.data_cache_path": (None, None),
    "data.train_data_exact_num_epochs": (NO, None),
    "data.dataloader_type": ("single", "single"),
    "data.data_sharding": (True, True),
    "data.num_workers": (2, 2),
    "data.reset_position_ids": (False, False),
    "data.reset_attention_mask": (False, False),
    "data.eod_mask_loss": (False, False),
    "data.mask_prob": (0.15, 0.15),
    "data.short_seq_prob": (0.1, 0.1),
    "data.mock_data": (False, NO),
    "training.train_iters": (None, None),
    "training.train_samples": (None, None),
    "training.train_tokens": (NO, None),
    "training.seed": (1234, 1234),
    "training.eval_interval": (None, 1000),
    "training.eval_iters": (100, 100),
    "training.exit_interval": (None, None),
    "training.exit_duration_in_mins": (None, None),
    "training.skip_train": (False, False),
    "training.deterministic_mode": (False, NO),
    "finetune.task": (NO, REQUIRED),
    "finetune.train_data": (NO, ()),
    "finetune.valid_data": (NO, ()),
    "finetune.epochs": (NO, None),
    "finetune.pretrained_checkpoint": (NO, None),
    "distillation.kd": (NO, False),
    "distillation.load_teacher": (NO, None),
    "distillation.kd_beta_ce": (NO, 1.0),
    "distillation.kd_temp": (NO, 1.0),
    "distillation.num_layers_teacher": (NO, None),
    "distillation.hidden_size_teacher": (NO, None),
    "distillation.num_attention_heads_teacher": (NO, None),
    "distillation.num_experts_teacher": (NO, ()),
    "skipping.random_ltd": (NO, False),
    "checkpoint.save": (None, None),
    "checkpoint.load": (None, None),
    "checkpoint.ckpt_step": (None, NO),
    "checkpoint.save_interval": (None, None),
    "checkpoint.save_retain_interval": (None, NO),
    "checkpoint.async_save": (False, NO),
    "checkpoint.moe_use_upcycling": (False, NO),
    "checkpoint.finetune": (False, False),
    "checkpoint.no_load_optim": (False, False),
    "checkpoint.no_load_rng": (False, False),
    "checkpoint.no_save_optim": (False, False),
    "checkpoint.no_save_rng": (False, False),
    "checkpoint.exit_on_missing_checkpoint": (False, False),
    "checkpoint.override_opt_param_scheduler": (False, False),
    "logging.log_interval": (100, 100),
    "logging.tensorboard_dir": (None, None),
    "logging.tensorboard_log_interval": (1, 1),
    "logging.tensorboard_queue_size": (1000, 1000),
    "logging.log_validation_ppl_to_tensorboard": (False, False),
    "logging.log_timers_to_tensorboard": (False, False),
    "logging.log_params_norm": (False, False),
    "logging.log_num_zeros_in_grad": (False, False),
    "logging.wandb_project": (None, None),
    "logging.wandb_exp_name": (None, None),
    "logging.wandb_save_dir": (None, None),
    "logging.wandb_entity": (None, NO),
    "guards.check_weights_interval": (None, NO),
    "guards.iterations_to_skip": ((), NO),
    "offload.fraction": (1.0, NO),
    "offload.pin_memory": (True, NO),
}

OFFLOAD_OF_MEGATRON = ("fraction", "pin_memory")
GUARDS_OF_MEGATRON = ("check_weights_interval", "iterations_to_skip")

# Settings that neither Megatron has a flag for.
OURS = {
    "model.family",
    "model.num_classes",
    "model.moe_capacity_scope",
    "finetune.test_data",
    "finetune.text_columns",
    "finetune.choice_columns",
    "finetune.label_column",
    "finetune.id_column",
    "finetune.labels",
    "finetune.predictions",
    "distillation.kd_train_iters",
    *(spec.path for spec in FIELDS if spec.section in ("curriculum", "data_sampling")),
    *(spec.path for spec in FIELDS if spec.section == "skipping" and spec.name != "random_ltd"),
    *(spec.path for spec in FIELDS if spec.section == "acceleration"),
    "logging.log_stability",
    "logging.straggler_interval",
    "parallel.heartbeat_timeout_minutes",
    "training.eval_from_start",
    *(spec.path for spec in FIELDS if spec.section == "guards" and spec.name not in GUARDS_OF_MEGATRON),
    *(spec.path for spec in FIELDS if spec.section == "offload" and spec.name not in OFFLOAD_OF_MEGATRON),
    "model.bert_head_activation",
    "model.bert_token_types",
    "data.bert_pack",
    "parallel.pipeline_schedule",
    "parallel.pipeline_partition",
    "parallel.check_collectives",
    "parallel.device",
    "zero.prefetch_size",
    "zero.param_persistence_threshold",
    "zero.max_live_parameters",
    "zero.hpz_partition_size",
    "zero.quantized_weights",
    "zero.quantized_gradients",
    "zero.quantization_block_size",
    "zero.quantization_rounding",
    "zero.node_size",
    "optimizer.lamb_max_coeff",
    "optimizer.lamb_min_coeff",
    "optimizer.lamb_bias_correction",
    "optimizer.lamb_adapt_all",
    "optimizer.onebit_freeze_step",
    "optimizer.onebit_precondition",
    "optimizer.onebit_lamb_coeff_beta",
    "optimizer.onebit_lamb_factor_max",
    "optimizer.onebit_lamb_factor_min",
    "optimizer.onebit_lamb_factor_threshold",
    "optimizer.zero_one_var_freeze_step",
    "optimizer.zero_one_var_update_scaler",
    "optimizer.zero_one_local_step_scaler",
    "optimizer.zero_one_local_step_clipper",
    "optimizer.adagrad_eps",
    "optimizer.adadelta_rho",
    "optimizer.adadelta_eps",
    "optimizer.rmsprop_alpha",
    "optimizer.muon_ns_dtype",
    "optimizer.muon_scalar_lr",
    "optimizer.lr_wsd_decay_tokens",
    "checkpoint.load_hf",
    "checkpoint.keep_last",
    "checkpoint.async_save_limit",
    "checkpoint.verify_checkpoint",
    "data.verify_data",
    "logging.metrics_jsonl",
    "logging.wall_clock_breakdown",
    "logging.comms_logger",
    "logging.csv_dir",
    "logging.wandb_group",
}

_SUMS = "fp16 with `--fp16`, else fp32"

# What was decided where they differ, or where neither's default would do: the tree's default, then the words
# of the documentation for it and for the two Megatrons'.
DECIDED: dict[str, tuple[Any, str, str, str]] = {
    "model.max_position_embeddings": (None, "the sequence length", REQUIRED, REQUIRED),
    "model.moe_layer_freq": (None, "1, or none with `--expert-interval`", "1", "has no such flag"),
    "model.expert_interval": (None, "none: `--moe-layer-freq` says it", "has no such flag", "2"),
    "model.moe_router_topk": (2, "2", "2", "1"),
    "model.moe_aux_loss_coeff": ((0.0,), "0.0", "0.0", "0.1"),
    "model.moe_router_sampling": ("none", "none", "has no such flag", "second, where there are two"),
    "model.moe_expert_capacity_factor": (None, "none, so that no token is dropped", "none", "1.0"),
    "model.moe_eval_capacity_factor": (None, "that of the training", "has no such flag", "1.0"),
    "model.moe_min_capacity": (0, "0", "has no such flag", "4"),
    "guards.check_weights_interval": (500, "500", "never", "has no such flag"),
    "parallel.expert_tensor_parallel_size": (
        None,
        "the tensor-parallel size",
        "the tensor-parallel size",
        "1",
    ),
    "parallel.moe_token_dispatcher_type": (
        "alltoall",
        "alltoall",
        "allgather",
        "alltoall (there is no other)",
    ),
    "parallel.distributed_backend": ("auto", "auto", "nccl", "nccl"),
    "zero.stage": (0, "0", "0 (`--use-distributed-optimizer` is off)", "1"),
    "zero.bucket_size": (16_000_000, "16000000", "max(40000000, 1000000 x data-parallel size)", "0"),
    "zero.overlap_grad_reduce": (True, "on", "off", "has no such flag"),
    "zero.overlap_param_gather": (True, "on", "off", "has no such flag"),
    "zero.grad_accumulation_dtype": ("fp32", "fp32", _SUMS, _SUMS),
    "zero.grad_reduce_dtype": ("fp32", "fp32", _SUMS, _SUMS),
    "recompute.method": ("uniform", "uniform", "required with full", "required with full"),
    "recompute.num_layers": (1, "1", "required with full", "1"),
    "tokenizer.tokenizer_type": (
        None,
        "GPT2BPETokenizer (BERT: BertWordPieceLowerCase), or none with `--vocab-size` and no files",
        "GPT2BPETokenizer (BERT: BertWordPieceLowerCase)",
        "GPT2BPETokenizer (BERT: BertWordPieceLowerCase)",
    ),
    "data.data_sharding": (False, "off", "on", "on"),
    "training.eval_interval": (1000, "1000", "never", "1000"),
    "finetune.task": (None, "none, which is pretraining", "has no such flag", "required by `tasks/main.py`"),
    "finetune.epochs": (3, "3", "has no such flag", "required to train"),
}


def test_each_setting_is_a_megatrons_or_ours() -> None:
    assert {*FACTS, *OURS} == {spec.path for spec in FIELDS}
    assert not OURS & set(FACTS)


@pytest.mark.parametrize("path", [path for path in FACTS if path not in DECIDED])
def test_where_both_agree_it_is_the_default(path: str) -> None:
    """So it is where only one of them has the setting."""
    defaults = [value for value in FACTS[path] if value != NO]
    assert all(value == defaults[0] for value in defaults)
    spec = FIELD_BY_PATH[path]
    assert (REQUIRED if spec.required else spec.default) == defaults[0]


@pytest.mark.parametrize("path", DECIDED)
def test_what_was_decided_differs_from_one_of_them(path: str) -> None:
    spec = FIELD_BY_PATH[path]
    assert not spec.required
    assert spec.default == DECIDED[path][0]
    assert any(value != spec.default for value in FACTS[path] if value != NO)


def test_the_decisions_are_listed() -> None:
    listed = {each.path: (each.here, each.megatron_lm, each.megatron_deepspeed) for each in DECISIONS}
    assert listed == {path: row[1:] for path, row in DECIDED.items()}
    assert all(len(each.why) > 20 for each in DECISIONS)


LAUNCH = shlex.split(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 100 --data-path my_text_document"
)


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("--vocab-file v --merge-file m", "GPT2BPETokenizer"),
        ("--vocab-file v --merge-file m --vocab-size 50257", "GPT2BPETokenizer"),
        ("--vocab-size 50257", None),
        ("--tokenizer-type NullTokenizer --vocab-size 50257", "NullTokenizer"),
        ("--tokenizer-type HFTokenizer --tokenizer-model t --vocab-file v", "HFTokenizer"),
    ],
)
def test_a_launch_without_a_tokenizers_name_takes_gpt2s(flags: str, kind: str | None) -> None:
    """17 of the launch lines of Megatron-DeepSpeed's examples were refused for this alone."""
    assert parse_config([*LAUNCH, *flags.split()]).config.tokenizer.tokenizer_type == kind
