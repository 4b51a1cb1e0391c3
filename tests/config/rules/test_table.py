"""Every rule has an example that breaks it and no other; the base configuration breaks none."""

from __future__ import annotations

from typing import Any

import pytest

from megazero.config import Config
from megazero.config.fields import FIELD_BY_PATH, FIELDS, SECTIONS
from megazero.config.rules import RULES, Case, broken_rules, check
from tests.config.samples import make_config

WORLD = 4

TASK = {
    "finetune.task": "MNLI",
    "finetune.train_data": ("a.tsv",),
    "data.data_path": (),
    "training.train_iters": None,
}

EXPERTS = {"model.num_experts": (8,)}
GROUPED = {**EXPERTS, "model.moe_router_num_groups": 4, "model.moe_router_group_topk": 2}
RAMP = {
    "curriculum.seqlen_schedule": "fixed_linear",
    "curriculum.seqlen_min_difficulty": 8,
    "curriculum.seqlen_total_curriculum_step": 5,
}
METRIC = {
    "name": "rarity",
    "index_to_sample_path": "samples",
    "index_to_metric_path": "values",
    "min_difficulty": 10,
    "max_difficulty": 500,
    "schedule_type": "fixed_linear",
    "total_curriculum_step": 50,
}


def metric(**changes: Any) -> dict[str, Any]:
    return {"data_sampling.curriculum_metrics": ({**METRIC, **changes},)}


LEVELS = {
    "schedule_type": "fixed_discrete",
    "total_curriculum_step": None,
    "difficulty": (10, 20),
    "max_step": (3,),
}
DROPS = {
    "model.num_layers": 4,
    "skipping.random_ltd": True,
    "skipping.random_ltd_min_value": 16,
    "skipping.random_ltd_require_steps": 5,
}
TAUGHT = {"distillation.kd": True, "distillation.load_teacher": "teacher"}
UPCYCLED = {**EXPERTS, "checkpoint.moe_use_upcycling": True, "checkpoint.load": "dense"}

# rule -> the changes to the base configuration that break it alone, on 4 ranks
EXAMPLES: dict[str, dict[str, Any]] = {
    "hidden_multiple_of_heads": {"model.hidden_size": 66},
    "query_groups_divide_heads": {"model.num_query_groups": 3},
    "rotary_dim_even": {"model.position_embedding_type": "rope", "model.kv_channels": 15},
    "rotary_settings_need_rope": {"model.rotary_percent": 0.5},
    "positions_cover_sequence": {"model.max_position_embeddings": 31},
    "world_size_factors": {"parallel.tensor_model_parallel_size": 8, "model.num_attention_heads": 8},
    "heads_over_tensor_ranks": {"parallel.tensor_model_parallel_size": 4, "model.num_attention_heads": 2},
    "query_groups_over_tensor_ranks": {
        "parallel.tensor_model_parallel_size": 4,
        "model.num_query_groups": 2,
    },
    "ffn_over_tensor_ranks": {"parallel.tensor_model_parallel_size": 4, "model.ffn_hidden_size": 102},
    "sequence_over_tensor_ranks": {
        "parallel.tensor_model_parallel_size": 4,
        "parallel.sequence_parallel": True,
        "model.seq_length": 30,
    },
    "context_parallel_unavailable": {"parallel.context_parallel_size": 2},
    "nccl_needs_cuda": {"parallel.distributed_backend": "nccl", "parallel.device": "cpu"},
    "expert_ranks_need_experts": {"parallel.expert_model_parallel_size": 2},
    "experts_over_expert_ranks": {
        "model.num_experts": (4, 4, 4, 6),
        "parallel.expert_model_parallel_size": 4,
    },
    "expert_ranks_fill_stages": {
        **EXPERTS,
        "parallel.pipeline_model_parallel_size": 2,
        "parallel.expert_model_parallel_size": 4,
    },
    "expert_width_over_expert_tensor_ranks": {
        **EXPERTS,
        "model.moe_ffn_hidden_size": 30,
        "parallel.expert_tensor_parallel_size": 4,
    },
    "dense_width_over_tensor_ranks": {
        **EXPERTS,
        "model.moe_shared_expert_intermediate_size": 30,
        "parallel.tensor_model_parallel_size": 4,
    },
    "one_way_to_place_experts": {**EXPERTS, "model.moe_layer_freq": (1,), "model.expert_interval": 1},
    "layer_pattern_is_whole": {**EXPERTS, "model.moe_layer_freq": (1, 1, 0)},
    "some_layer_has_experts": {**EXPERTS, "model.expert_interval": 5},
    "pyramid_has_all_layers": {"model.num_experts": (8, 8, 8)},
    "shared_gate_needs_shared_experts": {**EXPERTS, "model.moe_shared_expert_gate": True},
    "residual_or_shared_experts": {
        **EXPERTS,
        "model.mlp_type": "residual",
        "model.moe_shared_expert_intermediate_size": 32,
    },
    "packed_rows_have_no_experts": {**EXPERTS, "model.family": "bert", "data.bert_pack": True},
    "topk_within_experts": {"model.num_experts": (8, 8, 8, 2), "model.moe_router_topk": 3},
    "router_groups_complete": {**EXPERTS, "model.moe_router_num_groups": 4},
    "router_groups_divide_experts": {**GROUPED, "model.num_experts": (8, 8, 8, 6)},
    "group_choice_within_groups": {**GROUPED, "model.moe_router_num_groups": 1},
    "group_choice_divides_topk": {**GROUPED, "model.moe_router_topk": 3},
    "topk_within_groups": {**GROUPED, "model.moe_router_topk": 6},
    "one_expert_needs_its_probability": {**EXPERTS, "model.moe_router_topk": 1},
    "expert_bias_needs_sigmoid": {**EXPERTS, "model.moe_router_enable_expert_bias": True},
    "sampling_fits_topk": {
        **EXPERTS,
        "model.moe_router_sampling": "second",
        "model.moe_router_topk": 3,
    },
    "sampling_is_of_softmax_scores": {
        **EXPERTS,
        "model.moe_router_sampling": "second",
        "model.moe_router_score_function": "sigmoid",
    },
    "balance_is_one": {
        **EXPERTS,
        "model.moe_router_load_balancing_type": ("aux_loss", "none"),
        "model.moe_aux_loss_coeff": (0.1, 0.0),
    },
    "balance_has_coefficients": {
        **EXPERTS,
        "model.moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"),
    },
    "capacity_settings_need_a_factor": {**EXPERTS, "model.moe_token_drop_policy": "position"},
    "padding_needs_a_factor": {**EXPERTS, "model.moe_pad_expert_input_to_capacity": True},
    "padding_needs_alltoall": {
        **EXPERTS,
        "model.moe_pad_expert_input_to_capacity": True,
        "model.moe_expert_capacity_factor": 2.0,
        "parallel.moe_token_dispatcher_type": "allgather",
    },
    "capacity_above_floor": {
        **EXPERTS,
        "model.moe_expert_capacity_factor": 1.0,
        "model.moe_min_capacity": 9,
    },
    "upcycling_makes_experts": {"checkpoint.moe_use_upcycling": True, "checkpoint.load": "dense"},
    "upcycling_has_a_dense_model": {**EXPERTS, "checkpoint.moe_use_upcycling": True},
    "upcycling_is_for_pretraining": {**UPCYCLED, **TASK},
    "upcycled_weights_sum_to_one": {**UPCYCLED, "model.moe_router_pre_softmax": True},
    "upcycled_weights_are_not_scaled": {**UPCYCLED, "model.moe_router_topk_scaling_factor": 2.5},
    "upcycled_experts_are_alone": {**UPCYCLED, "model.mlp_type": "residual"},
    "upcycled_experts_drop_nothing": {**UPCYCLED, "model.moe_expert_capacity_factor": 1.0},
    "upcycled_experts_have_the_mlp_s_width": {**UPCYCLED, "model.moe_ffn_hidden_size": 32},
    "global_batch_multiple": {"batch.global_batch_size": 12},
    "ramp_needs_global_batch": {"batch.rampup_batch_size": (8, 8, 100)},
    "ramp_starts_below_global_batch": {
        "batch.global_batch_size": 16,
        "batch.rampup_batch_size": (24, 8, 100),
    },
    "ramp_whole_increments": {"batch.global_batch_size": 32, "batch.rampup_batch_size": (8, 16, 100)},
    "ramp_increments": {"batch.global_batch_size": 8_000_000, "batch.rampup_batch_size": (8, 8, 10**7)},
    "ramp_multiples": {"batch.global_batch_size": 32, "batch.rampup_batch_size": (8, 4, 100)},
    "samples_fill_a_batch": {"training.train_iters": None, "training.train_samples": 7},
    "one_way_to_virtual_stages": {
        "parallel.pipeline_model_parallel_size": 2,
        "parallel.num_layers_per_virtual_pipeline_stage": 1,
        "parallel.num_virtual_stages_per_pipeline_rank": 2,
        "batch.global_batch_size": 8,
    },
    "layers_fill_virtual_stages": {
        "parallel.pipeline_model_parallel_size": 2,
        "parallel.num_layers_per_virtual_pipeline_stage": 2,
        "model.num_layers": 6,
    },
    "virtual_stages_need_interleaving": {
        "parallel.pipeline_model_parallel_size": 2,
        "parallel.num_virtual_stages_per_pipeline_rank": 2,
        "parallel.pipeline_schedule": "1f1b",
    },
    "chunks_within_layers": {
        "parallel.pipeline_model_parallel_size": 2,
        "parallel.pipeline_schedule": "zb-v",
        "model.num_layers": 3,
    },
    "interleaved_micro_batches": {
        "parallel.pipeline_model_parallel_size": 2,
        "parallel.num_virtual_stages_per_pipeline_rank": 2,
        "batch.global_batch_size": 12,
    },
    "partition_well_formed": {"parallel.pipeline_partition": "5"},
    "hpz_needs_stage_3": {"zero.hpz_partition_size": 2, "zero.stage": 2},
    "hpz_divides_data_parallel": {"zero.hpz_partition_size": 3, "zero.stage": 3},
    "fp16_gradients_need_fp16": {"zero.grad_accumulation_dtype": "fp16"},
    "main_params_fp32_or_same": {"zero.main_params_dtype": "bf16"},
    "training_length_given": {"training.train_iters": None},
    "iters_or_samples": {"training.train_samples": 1000},
    "tokens_countable": {"training.train_iters": 10**17},
    "min_lr_below_lr": {"optimizer.min_lr": 2e-3},
    "warmup_starts_below_lr": {"optimizer.lr_warmup_init": 2e-3},
    "one_lr_unit": {"optimizer.lr_decay_iters": 90, "optimizer.lr_warmup_samples": 9},
    "token_warmup_needs_token_decay": {"optimizer.lr_warmup_tokens": 64},
    "warmup_fraction_or_length": {"optimizer.lr_warmup_fraction": 0.1, "optimizer.lr_warmup_iters": 9},
    "warmup_shorter_than_decay": {"optimizer.lr_warmup_iters": 100},
    "wsd_needs_decay_length": {"optimizer.lr_decay_style": "WSD"},
    "wsd_length_needs_wsd": {"optimizer.lr_wsd_decay_iters": 10},
    "wsd_decay_fits": {
        "optimizer.lr_decay_style": "WSD",
        "optimizer.lr_wsd_decay_iters": 60,
        "optimizer.lr_warmup_iters": 50,
    },
    "weight_decay_range_complete": {
        "optimizer.start_weight_decay": 0.1,
        "optimizer.weight_decay_incr_style": "linear",
    },
    "weight_decay_range_needs_style": {
        "optimizer.start_weight_decay": 0.1,
        "optimizer.end_weight_decay": 0.2,
    },
    "weight_decay_style_needs_range": {"optimizer.weight_decay_incr_style": "cosine"},
    "weight_decay_grows": {
        "optimizer.start_weight_decay": 0.2,
        "optimizer.end_weight_decay": 0.1,
        "optimizer.weight_decay_incr_style": "linear",
    },
    "lamb_settings_need_lamb": {"optimizer.lamb_max_coeff": 0.3},
    "lamb_bounds_ordered": {"optimizer.optimizer": "lamb", "optimizer.lamb_min_coeff": 11.0},
    "loss_scale_needs_16_bits": {"precision.loss_scale": 4096.0},
    "min_loss_scale_below_initial": {"precision.min_loss_scale": 8.0, "precision.initial_loss_scale": 4.0},
    "recompute_units_within_model": {"recompute.granularity": "full", "recompute.num_layers": 5},
    "recompute_units_need_full": {"recompute.granularity": "selective", "recompute.method": "block"},
    "kept_activations_need_full": {"recompute.granularity": "selective", "recompute.offload": True},
    "partition_activations_or_sequence_parallel": {
        "recompute.granularity": "full",
        "recompute.partition_activations": True,
        "parallel.sequence_parallel": True,
    },
    "gpt2_tokenizer_files": {
        "tokenizer.tokenizer_type": "GPT2BPETokenizer",
        "tokenizer.vocab_file": "vocab.json",
    },
    "tokenizer_model_given": {"tokenizer.tokenizer_type": "SentencePieceTokenizer"},
    "wordpiece_vocab_file": {"tokenizer.tokenizer_type": "BertWordPieceCase"},
    "null_tokenizer_vocab_size": {"tokenizer.tokenizer_type": "NullTokenizer"},
    "extra_ids_have_a_tokenizer": {"tokenizer.vocab_extra_ids": 10},
    "data_source_given": {"data.data_path": ()},
    "one_data_source": {"data.mock_data": True},
    "training_data_given": {"data.data_path": (), "data.valid_data_path": ("v",)},
    "blend_in_pairs": {"data.data_path": ("0.5", "a", "b")},
    "exact_epochs_need_single_pass": {
        "data.train_data_exact_num_epochs": 1,
        "data.dataloader_type": "cyclic",
    },
    "data_sharding_needs_cyclic": {"data.data_sharding": True},
    "documents_end_only_in_running_text": {"model.family": "bert", "data.eod_mask_loss": True},
    "room_for_special_tokens": {"model.family": "bert", "model.seq_length": 4},
    "rollback_needs_checkpoints": {"guards.on_spike": "rollback"},
    "async_save_limit_needs_async_save": {"checkpoint.async_save_limit": 2},
    "labelled_data_need_a_task": {"finetune.train_data": ("a.tsv",)},
    "epochs_are_the_length": {**TASK, "training.train_iters": 9},
    "task_has_data": {**TASK, "finetune.train_data": ()},
    "predictions_have_samples": {**TASK, "finetune.predictions": "p.tsv"},
    "one_or_two_text_columns": {**TASK, "finetune.text_columns": ("a", "b", "c")},
    "choices_for_multiple_choice": {**TASK, "finetune.choice_columns": ("a", "b")},
    "labels_differ": {**TASK, "finetune.labels": ("a", "a")},
    "classes_are_the_labels": {**TASK, "model.num_classes": 2},
    "sequence_holds_marks_and_text": {**TASK, "model.seq_length": 4},
    "distillation_has_a_teacher": {"distillation.kd": True},
    "teacher_is_for_distillation": {"distillation.kd_temp": 2.0},
    "distillation_is_for_gpt": {**TAUGHT, "model.family": "bert"},
    "distillation_is_for_pretraining": {**TAUGHT, **TASK},
    "seqlen_ramp_has_its_numbers": {"curriculum.seqlen_schedule": "fixed_linear"},
    "seqlen_root_has_a_degree": {**RAMP, "curriculum.seqlen_schedule": "fixed_root"},
    "seqlen_ramp_is_one": {**RAMP, "curriculum.seqlen_schedule": "none"},
    "seqlen_levels_fit": {
        "curriculum.seqlen_schedule": "fixed_discrete",
        "curriculum.seqlen_difficulty": (8, 16),
    },
    "seqlen_ramp_grows": {**RAMP, "curriculum.seqlen_max_difficulty": 4},
    "seqlen_changes_countable": {
        **RAMP,
        "curriculum.seqlen_difficulty_step": 1,
        "model.seq_length": 10**6,
        "model.position_embedding_type": "rope",
    },
    "seqlen_within_sequences": {**RAMP, "curriculum.seqlen_max_difficulty": 10**5},
    "seqlen_divides_over_ranks": {
        **RAMP,
        "curriculum.seqlen_difficulty_step": 1,
        "parallel.tensor_model_parallel_size": 2,
        "parallel.sequence_parallel": True,
    },
    "seqlen_ramp_ends_in_time": {**RAMP, "curriculum.seqlen_total_curriculum_step": 10**6},
    "seqlen_is_for_pretraining": {**RAMP, **TASK},
    "seqlen_custom_has_a_function": {"curriculum.seqlen_schedule": "custom"},
    "seqlen_custom_is_a_pacing": {
        "curriculum.seqlen_schedule": "custom",
        "curriculum.seqlen_custom_schedule": "math:no_such_function",
    },
    "seqlen_kind_has_a_schedule": {"curriculum.seqlen_kind": "reshape"},
    "seqlen_reshape_is_for_text": {**RAMP, "curriculum.seqlen_kind": "reshape", "model.family": "bert"},
    "metric_has_its_index": metric(index_to_metric_path=""),
    "metric_is_sampled_by": metric(clustering_type="single_cluster"),
    "metric_ramp_has_its_numbers": metric(max_difficulty=None),
    "metric_root_has_a_degree": metric(schedule_type="fixed_root"),
    "metric_levels_fit": metric(**{**LEVELS, "max_step": (3, 4)}),
    "metric_difficulty_grows": metric(min_difficulty=501),
    "percentile_within_hundred": metric(difficulty_type="percentile"),
    "metric_changes_countable": metric(max_difficulty=10**9),
    "metric_ramp_ends_in_time": metric(total_curriculum_step=101),
    "metrics_are_for_pretraining": {**metric(), **TASK},
    "metrics_or_data_sharding": {
        **metric(),
        "data.data_sharding": True,
        "data.dataloader_type": "cyclic",
    },
    "random_ltd_has_its_numbers": {"skipping.random_ltd": True},
    "random_ltd_settings_need_it": {"skipping.random_ltd_min_value": 8},
    "random_ltd_grows": {**DROPS, "skipping.random_ltd_max_value": 8},
    "random_ltd_changes_countable": {
        **DROPS,
        "skipping.random_ltd_seq_per_step": 1,
        "model.seq_length": 10**6,
    },
    "random_ltd_layers_exist": {**DROPS, "skipping.random_ltd_layer_id": (1, 1)},
    "random_ltd_counts_fit": {**DROPS, "skipping.random_ltd_layer_num": 3},
    "random_ltd_divides_over_ranks": {
        **DROPS,
        "skipping.random_ltd_seq_per_step": 1,
        "parallel.tensor_model_parallel_size": 2,
        "parallel.sequence_parallel": True,
    },
    "random_ltd_leaves_packed_rows": {**DROPS, "data.bert_pack": True},
    "random_ltd_ramp_ends_in_time": {**DROPS, "skipping.random_ltd_require_steps": 10**6},
    "skipping_is_for_pretraining": {"skipping.progressive_layer_drop": True, **TASK},
    "layer_drop_settings_need_it": {"skipping.pld_theta": 0.25},
}

# Combinations near a rule's border that must run.
ACCEPTED: list[dict[str, Any]] = [
    {},
    metric(),
    metric(difficulty_type="percentile", index_to_metric_path="", min_difficulty=1, max_difficulty=None),
    metric(**LEVELS),
    metric(**LEVELS, min_difficulty=10, max_difficulty=20),
    metric(schedule_type="fixed_root", root_degree=2.0, min_difficulty=-500),
    {**metric(), **RAMP, "data.train_data_exact_num_epochs": 5},
    {**metric(), "data_sampling.curriculum_unit": "tokens", "training.train_tokens": 10**6},
    {**UPCYCLED, "model.moe_ffn_hidden_size": 256},
    {**UPCYCLED, "model.moe_router_score_function": "sigmoid", "model.moe_router_topk_scaling_factor": 1.0},
    {"model.hidden_size": 66, "model.kv_channels": 16},
    {"model.num_query_groups": 1},
    {"data.data_sharding": True, "data.dataloader_type": "cyclic"},
    {"model.position_embedding_type": "rope", "model.rotary_percent": 0.25},
    {"model.max_position_embeddings": 32},
    {"model.vocab_size": 100, "tokenizer.tokenizer_type": None},
    {"parallel.sequence_parallel": True, "model.seq_length": 31},
    {"parallel.tensor_model_parallel_size": 4, "parallel.sequence_parallel": True},
    {"precision.dtype": "fp16", "precision.loss_scale": 12.0, "parallel.device": "cpu"},
    {"batch.global_batch_size": 32, "batch.rampup_batch_size": (8, 8, 100)},
    {"batch.global_batch_size": 8, "batch.rampup_batch_size": (8, 8, 100)},
    {"training.train_tokens": 10**6},
    {"training.train_iters": None, "training.train_samples": 8},
    {"training.train_iters": None, "training.train_tokens": 1},
    {"optimizer.min_lr": 1e-3},
    {"optimizer.lr_warmup_iters": 99},
    {"optimizer.lr_warmup_samples": 799},
    {"optimizer.lr_warmup_fraction": 0.5, "optimizer.lr_decay_tokens": 10**6},
    {"optimizer.lr_warmup_iters": 10, "optimizer.lr_decay_tokens": 10**6},
    {"optimizer.lr_warmup_samples": 10, "optimizer.lr_decay_tokens": 10**6},
    {"optimizer.lr_warmup_tokens": 64, "optimizer.lr_decay_style": "constant"},
    {"optimizer.lr_warmup_tokens": 64, "training.train_iters": None, "training.train_tokens": 10**5},
    {"precision.dtype": "bf16", "precision.loss_scale": 4096.0},
    {
        "checkpoint.save_interval": 10,
        "checkpoint.save_retain_interval": 100,
        "checkpoint.no_load_optim": True,
    },
    {
        "optimizer.lr_decay_style": "WSD",
        "optimizer.lr_wsd_decay_iters": 50,
        "optimizer.lr_warmup_iters": 50,
    },
    {"data.data_path": ("0.3", "a", "7", "b")},
    {"data.data_path": (), "data.mock_data": True},
    {"data.data_path": (), "data.valid_data_path": ("v",), "training.skip_train": True},
    {"data.data_path": (), "data.train_data_path": ("1", "a", "2", "b"), "data.valid_data_path": ("v",)},
    {"recompute.granularity": "full", "recompute.method": "block", "recompute.num_layers": 4},
    {"recompute.granularity": "full", "recompute.partition_activations": True, "recompute.offload": True},
    {"parallel.pipeline_model_parallel_size": 4},
    {"parallel.pipeline_model_parallel_size": 2, "parallel.pipeline_schedule": "zb-v"},
    {"parallel.pipeline_schedule": "zb-v"},
    {"parallel.num_virtual_stages_per_pipeline_rank": 1},
    {
        "parallel.pipeline_model_parallel_size": 2,
        "parallel.num_layers_per_virtual_pipeline_stage": 1,
        "batch.global_batch_size": 24,
        "batch.rampup_batch_size": (8, 8, 100),
    },
    {"parallel.pipeline_model_parallel_size": 2, "parallel.pipeline_partition": "3, 1"},
    {"parallel.pipeline_partition": "type:transformer.*"},
    {"zero.stage": 3, "zero.hpz_partition_size": 2, "zero.prefetch_size": 0},
    {"zero.prefetch_size": 0, "zero.max_live_parameters": 0, "zero.param_persistence_threshold": 0},
    {"precision.dtype": "fp16", "zero.main_params_dtype": "fp16", "zero.grad_reduce_dtype": "fp16"},
    {"precision.dtype": "fp16", "zero.grad_accumulation_dtype": "bf16"},
    {"model.moe_router_topk": 1, "model.moe_shared_expert_gate": True, "model.moe_min_capacity": 9},
    {"parallel.expert_tensor_parallel_size": 3, "model.moe_layer_freq": (0,)},
    {**EXPERTS, "parallel.expert_model_parallel_size": 4},
    {**EXPERTS, "parallel.tensor_model_parallel_size": 4, "parallel.expert_model_parallel_size": 1},
    {
        **EXPERTS,
        "parallel.tensor_model_parallel_size": 4,
        "parallel.expert_tensor_parallel_size": 1,
        "parallel.expert_model_parallel_size": 4,
    },
    {**EXPERTS, "parallel.expert_tensor_parallel_size": 4, "model.moe_ffn_hidden_size": 4},
    {"model.num_experts": (4, 8), "model.expert_interval": 2},
    {"model.num_experts": (4, 8), "model.moe_layer_freq": (3,)},
    {"model.num_experts": (4, 1, 8), "model.moe_layer_freq": (1, 0, 1, 1)},
    {**GROUPED, "model.moe_router_topk": 4},
    {**EXPERTS, "model.moe_router_topk": 1, "model.moe_router_pre_softmax": True},
    {**EXPERTS, "model.moe_router_topk": 1, "model.moe_router_score_function": "sigmoid"},
    {
        **EXPERTS,
        "model.moe_router_topk": 1,
        "model.moe_router_pre_softmax": True,
        "model.moe_router_sampling": "first",
    },
    {
        **EXPERTS,
        "model.moe_router_score_function": "sigmoid",
        "model.moe_router_enable_expert_bias": True,
        "model.moe_aux_loss_coeff": (0.01,),
    },
    {**EXPERTS, "model.moe_router_topk": 8},
    {
        **EXPERTS,
        "model.moe_expert_capacity_factor": 1.0,
        "model.moe_eval_capacity_factor": 0.5,
        "model.moe_min_capacity": 8,
        "model.moe_token_drop_policy": "random",
        "model.moe_pad_expert_input_to_capacity": True,
    },
    {
        **EXPERTS,
        "model.moe_expert_capacity_factor": 1.0,
        "model.moe_capacity_scope": "micro_batch",
        "model.moe_min_capacity": 16,
    },
    {**EXPERTS, "model.mlp_type": "residual", "model.family": "bert"},
    {**EXPERTS, **TASK},
    TASK,
    {**TASK, "finetune.epochs": 0, "finetune.train_data": (), "finetune.test_data": ("a", "b")},
    {**TASK, "finetune.valid_data": ("b",), "finetune.predictions": "p"},
    {**TASK, "finetune.labels": ("a", "b"), "model.num_classes": 2},
    {**TASK, "finetune.task": "RACE", "model.num_classes": 1},
    {**TASK, "finetune.task": "classification", "finetune.text_columns": ("a",), "model.num_classes": 9},
    {
        **TASK,
        "finetune.task": "multiple-choice",
        "finetune.text_columns": ("a", "b"),
        "finetune.choice_columns": ("c",),
    },
]


def test_the_examples_are_of_all_rules() -> None:
    assert [rule.name for rule in RULES] == list(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_breaks_its_rule_alone(name: str) -> None:
    config = make_config(EXAMPLES[name])
    assert [rule.name for rule in broken_rules(config, WORLD)] == [name]
    (sentence,) = check(config, WORLD)
    assert " must " in sentence
    assert ", but " in sentence
    assert sentence.endswith(f"[rule {name}].")


@pytest.mark.parametrize("changes", ACCEPTED)
def test_accepted(changes: dict[str, Any]) -> None:
    assert check(make_config(changes), WORLD) == []


def test_without_a_world_size_only_its_rules_are_silent() -> None:
    silent = {name for name, changes in EXAMPLES.items() if not check(make_config(changes), None)}
    assert silent == {
        "world_size_factors",
        "global_batch_multiple",
        "ramp_multiples",
        "samples_fill_a_batch",
        "tokens_countable",
        "interleaved_micro_batches",
        "hpz_divides_data_parallel",
        "expert_ranks_fill_stages",
        "warmup_shorter_than_decay",
        "wsd_decay_fits",
        "seqlen_ramp_ends_in_time",
        "metric_ramp_ends_in_time",
        "random_ltd_ramp_ends_in_time",
    }


@pytest.mark.parametrize(
    ("partition", "fault"),
    [
        ("parameter", "it is not one of uniform, parameters, cost, measured, type:REGEX or"),
        ("Uniform", "it is not one of"),
        ("", "it is not one of"),
        ("4,", "it is not one of"),
        ("2,-1,3", "it is not one of"),
        ("type:", "the regular expression is empty"),
        ("type:(", "the regular expression is not valid: missing ), unterminated subpattern at position 0"),
        ("1,3,0", "2 positive numbers that add up to 4 are needed"),
        ("4,0", "2 positive numbers that add up to 4 are needed"),
        ("2,3", "2 positive numbers that add up to 4 are needed"),
        ("4", "2 positive numbers that add up to 4 are needed"),
    ],
)
def test_what_is_wrong_with_a_partition_is_said(partition: str, fault: str) -> None:
    changes = {"parallel.pipeline_model_parallel_size": 2, "parallel.pipeline_partition": partition}
    (sentence,) = check(make_config(changes), 2)
    assert f"({fault}" in sentence


def test_too_many_chunks_are_told_how_many_fit() -> None:
    changes = {"parallel.pipeline_model_parallel_size": 4, "parallel.pipeline_schedule": "zb-v"}
    (sentence,) = check(make_config(changes), 4)
    assert "(that makes 8 chunks; 4 layers suffice for 2 stages of 2)" in sentence


def test_interleaved_micro_batches_are_judged_at_every_rung_of_the_ramp() -> None:
    changes = {
        "parallel.pipeline_model_parallel_size": 2,
        "parallel.num_layers_per_virtual_pipeline_stage": 1,
        "batch.global_batch_size": 16,
        "batch.rampup_batch_size": (8, 4, 100),
    }
    (sentence,) = check(make_config(changes), 4)
    assert "(micro-batches per step: 2, 3, 4)" in sentence


def test_violations_are_reported_together() -> None:
    changes = {
        **EXAMPLES["min_lr_below_lr"],
        **EXAMPLES["blend_in_pairs"],
        **EXAMPLES["positions_cover_sequence"],
    }
    assert [rule.name for rule in broken_rules(make_config(changes), WORLD)] == [
        "positions_cover_sequence",
        "min_lr_below_lr",
        "blend_in_pairs",
    ]


def test_a_violation_reads_as_a_sentence_with_values_and_what_would_do() -> None:
    changes = {"parallel.tensor_model_parallel_size": 4, "model.num_query_groups": 2}
    assert check(make_config(changes), 6) == [
        "the world size must be a multiple of tensor x pipeline x context parallel size, but "
        "`tensor_model_parallel_size` is 4 and `pipeline_model_parallel_size` is 1 and "
        "`context_parallel_size` is 1 (the world size is 6: tensor x pipeline x data parallel can be "
        "2 x 1 x 3, 1 x 1 x 6, 2 x 3 x 1, 1 x 2 x 3, 1 x 3 x 2); start another number of ranks (torchrun "
        "--nproc-per-node; with --check-config set WORLD_SIZE), or change the layout "
        "[rule world_size_factors].",
        "`num_query_groups` must be a multiple of `tensor_model_parallel_size`, but `num_query_groups` is 2 "
        "and `tensor_model_parallel_size` is 4; use more query groups or fewer tensor-parallel ranks "
        "[rule query_groups_over_tensor_ranks].",
    ]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_names_and_fields_are_real(rule: Any) -> None:
    assert rule.fields or rule.reads
    assert all(path in FIELD_BY_PATH for path in rule.fields + rule.reads)
    assert not rule.remedy.endswith(".")


class _Reads:
    """Sections that note each field that is read of them."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.classes = {name: self._recorder(name) for name in SECTIONS}

    def _recorder(self, section: str) -> type:
        seen = self.seen

        class Recorder(SECTIONS[section]):  # type: ignore[misc]
            def __getattribute__(self, name: str) -> Any:
                if f"{section}.{name}" in FIELD_BY_PATH:
                    seen.add(f"{section}.{name}")
                return super().__getattribute__(name)

        return Recorder

    def of(self, config: Config) -> Config:
        sections = {
            name: recorder.model_construct(**dict(getattr(config, name)))
            for name, recorder in self.classes.items()
        }
        return Config.model_construct(**sections)


def test_a_rule_declares_all_that_it_reads() -> None:
    """A rule is left out where a field it reads is unsound, so it must not read others."""
    reads = _Reads()
    for changes in [*EXAMPLES.values(), *ACCEPTED]:
        case = Case(reads.of(make_config(changes)), WORLD)
        for rule in RULES:
            reads.seen.clear()
            rule.holds(case)
            if rule.detail:
                rule.detail(case)
            assert reads.seen <= set(rule.fields + rule.reads), rule.name
    rule = RULES[0]
    reads.seen.clear()
    rule.holds(case)
    assert "model.kv_channels" in reads.seen


def test_rules_on_unsound_fields_are_left_out() -> None:
    config = make_config(EXAMPLES["min_lr_below_lr"])
    assert check(config, WORLD, {"optimizer.lr"}) == []
    for spec in FIELDS:
        assert check(make_config(), WORLD, {spec.path}) == []


@pytest.mark.parametrize(
    ("path", "accepted"),
    [
        (("a", "b"), True),  # each in proportion to its size, as in Megatron-Core
        (("a", "b", "c"), True),
        (("0.3", "a", "0.7", "b"), True),
        (("0", "a", "1", "b"), False),
        (("a", "0.3", "b", "0.7"), False),
        (("0.3", "a", "b", "c"), False),
    ],
)
def test_a_data_path_is_prefixes_or_pairs(path, accepted):
    rule = next(rule for rule in RULES if rule.name == "blend_in_pairs")
    assert rule.holds(Case(make_config({"data.data_path": path}), WORLD)) is accepted
