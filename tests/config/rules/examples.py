"""Settings that break one rule each, and settings that break none: what test_table.py goes through."""

from __future__ import annotations

from typing import Any

from tests.source_tree import ROOT

WORLD = 4

POLICY: dict[str, Any] = {
    "policy.policy_method": "grpo",
    "policy.prompts": ("p.jsonl",),
    "policy.reward_functions": ("m:f",),
    "policy.group_size": 2,
    "batch.global_batch_size": 16,
    "policy.max_answer_tokens": 4,
}
TASK = {
    "finetune.task": "MNLI",
    "finetune.train_data": ("a.tsv",),
    "data.data_path": (),
    "training.train_iters": None,
}

EXPERTS = {"model.num_experts": (8,)}
DELAYED = {"offload.delayed_param_update": True, "offload.optimizer": "cpu"}
CODES = {"zero.stage": 1, "zero.quantized_gradients": "int8"}
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
FP8 = {"precision.fp8_format": "hybrid"}
GRAPHED = {"acceleration.cuda_graph": True}
COMPILED = {"acceleration.compile": True}
UPCYCLED = {**EXPERTS, "checkpoint.moe_use_upcycling": True, "checkpoint.load": "dense"}

PAIRS = {"model.family": "t5"}
RELATIVE = {**PAIRS, "model.position_embedding_type": "relative"}
SPARSE = {"model.sparse_block": 4}  # 8 blocks
FIXED = {**SPARSE, "model.sparse_attention": "fixed"}
BIGBIRD = {**SPARSE, "model.sparse_attention": "bigbird"}
HYBRID = {"model.hybrid_layer_pattern": "M*-M", "model.mamba_head_dim": 16, "model.mamba_num_groups": 4}
LAYERS = "model.heterogeneous_layers_config_encoded_json"
SMALL_MLP = '{"ffn_hidden_size": 64}'


def uneven(*attention: str) -> dict[str, Any]:
    """Layers of these attentions, and narrow MLPs."""
    layers = ", ".join(f'{{"attention": {each}, "ffn": {SMALL_MLP}}}' for each in attention)
    return {LAYERS: f'{{"block_configs": [{layers}]}}', "model.num_layers": len(attention)}


UNEVEN = uneven('{"num_query_groups": 4}', '{"no_op": true}')
EXTENDED = {
    "checkpoint.extend_context": True,
    "checkpoint.load": "short",
    "model.position_embedding_type": "yarn",
}

# rule -> the changes to the base configuration that break it alone, on 4 ranks
EXAMPLES: dict[str, dict[str, Any]] = {
    "padded_vocabulary_fits": {"model.pad_vocab_size_to": 100, "model.vocab_size": 101},
    "hidden_multiple_of_heads": {"model.hidden_size": 66},
    "query_groups_divide_heads": {"model.num_query_groups": 3},
    "rotary_dim_even": {"model.position_embedding_type": "rope", "model.kv_channels": 15},
    "one_rotary_scaling": {
        "model.position_embedding_type": "rope",
        "model.use_rope_scaling": True,
        "model.rotary_seq_len_interpolation_factor": 2.0,
    },
    "rotary_limits_in_order": {"model.position_embedding_type": "yarn", "model.yarn_beta_slow": 32.0},
    "positions_cover_sequence": {"model.max_position_embeddings": 31},
    "scaling_reaches_extended_context": {
        **EXTENDED,
        "model.rotary_scaling_factor": 3.0,
        "model.yarn_original_max_position_embeddings": 8,
    },
    "latent_heads_have_own_keys": {
        "model.multi_latent_attention": True,
        "model.position_embedding_type": "rope",
        "model.num_query_groups": 2,
    },
    "window_pattern_is_whole": {"model.window_size": (8, 0), "model.window_attn_skip_freq": (1,) * 9},
    "rotation_pattern_is_whole": {
        "model.position_embedding_type": "rope",
        "model.no_rope_freq": (1,) * 9,
    },
    "window_of_the_past": {"model.window_size": (8, 8)},
    "window_within_positions": {"model.window_size": (32, 0)},
    "some_layer_has_a_window": {"model.window_size": (-1, 0)},
    "layers_given_once": {
        **UNEVEN,
        "model.heterogeneous_layers_config_path": str(ROOT / "examples_3d/puzzle_tiny_layers.json"),
    },
    "layers_given_are_all": {**UNEVEN, "model.num_layers": 3},
    "layers_of_a_plain_gpt": {**UNEVEN, "model.norm_position": "both"},
    "layers_query_groups_divide_heads": uneven('{"n_heads_in_group": 3}'),
    "layers_over_tensor_ranks": {
        **uneven('{"num_query_groups": 2}'),
        "parallel.tensor_model_parallel_size": 4,
    },
    "layers_given_fit_the_model": {
        **UNEVEN,
        LAYERS: UNEVEN[LAYERS].replace('"block_configs"', '"hidden_size": 32, "block_configs"'),
    },
    "hybrid_pattern_length": {**HYBRID, "model.hybrid_layer_pattern": "MM*"},
    "hybrid_ratios_sum": {"model.hybrid_attention_ratio": 0.75, "model.hybrid_mlp_ratio": 0.5},
    "hybrid_pattern_keeps_ratios": {**HYBRID, "model.hybrid_mlp_ratio": 0.5},
    "hybrid_experts": {**HYBRID, "model.hybrid_layer_pattern": "M*-E"},
    "mamba_whole_heads": {**HYBRID, "model.mamba_head_dim": 48},
    "mamba_heads_in_groups": {**HYBRID, "model.mamba_num_groups": 3},
    "mamba_groups_over_tensor_ranks": {
        **HYBRID,
        "model.mamba_num_groups": 2,
        "parallel.tensor_model_parallel_size": 4,
    },
    "world_size_factors": {"parallel.tensor_model_parallel_size": 8, "model.num_attention_heads": 8},
    "heads_over_tensor_ranks": {"parallel.tensor_model_parallel_size": 4, "model.num_attention_heads": 2},
    "query_groups_over_tensor_ranks": {
        "parallel.tensor_model_parallel_size": 4,
        "model.num_query_groups": 2,
    },
    "ffn_over_tensor_ranks": {"parallel.tensor_model_parallel_size": 4, "model.ffn_hidden_size": 102},
    "sequence_over_ranks": {"parallel.context_parallel_size": 2, "model.seq_length": 30},
    "cp_comm_types_count": {"parallel.context_parallel_size": 2, "parallel.cp_comm_type": ("p2p",) * 3},
    "cp_blocks_given": {"parallel.context_parallel_size": 2, "parallel.cp_comm_type": ("a2a+p2p",)},
    "cp_blocks_multiply": {
        "parallel.context_parallel_size": 2,
        "parallel.hierarchical_context_parallel_sizes": (2, 2),
    },
    "heads_over_context_ranks": {
        "parallel.context_parallel_size": 4,
        "parallel.cp_comm_type": ("a2a",),
        "model.num_attention_heads": 2,
    },
    "random_ltd_attends_to_all_it_keeps": {
        **DROPS,
        "parallel.context_parallel_size": 2,
        "model.window_size": (8, 0),
    },
    "preferences_route_as_the_reference": {
        **EXPERTS,
        **TASK,
        "finetune.task": "preference",
        "tokenizer.tokenizer_type": "HFTokenizer",
        "tokenizer.tokenizer_model": "words",
        "model.moe_input_jitter_eps": 0.1,
    },
    "prompts_are_given": {**POLICY, "policy.prompts": ()},
    "rewards_are_given": {**POLICY, "policy.reward_functions": ()},
    "each_reward_has_a_weight": {**POLICY, "policy.reward_weights": (1.0, 2.0)},
    "updates_fill_a_rollout": {**POLICY, "policy.group_size": 3},
    "answers_leave_room_for_prompts": {**POLICY, "policy.max_answer_tokens": 1 << 20},
    "divergence_has_a_reference": {**POLICY, "policy.kl_coef": 0.1},
    "finetuning_shares_no_sequences": {**TASK, "parallel.context_parallel_size": 2},
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
    "layer_pattern_is_whole": {**EXPERTS, "model.moe_layer_freq": (1, 1, 0)},
    "some_layer_has_experts": {**EXPERTS, "model.expert_interval": 5},
    "pyramid_has_all_layers": {"model.num_experts": (8, 8, 8)},
    "topk_within_experts": {"model.num_experts": (8, 8, 8, 2), "model.moe_router_topk": 3},
    "router_groups_divide_experts": {**GROUPED, "model.num_experts": (8, 8, 8, 6)},
    "group_choice_within_groups": {**GROUPED, "model.moe_router_num_groups": 1},
    "group_choice_divides_topk": {**GROUPED, "model.moe_router_topk": 3},
    "topk_within_groups": {**GROUPED, "model.moe_router_topk": 6},
    "one_expert_needs_its_probability": {**EXPERTS, "model.moe_router_topk": 1},
    "balance_is_one": {
        **EXPERTS,
        "model.moe_router_load_balancing_type": ("aux_loss", "none"),
        "model.moe_aux_loss_coeff": (0.1, 0.0),
    },
    "assignment_alone": {
        **EXPERTS,
        "model.moe_router_load_balancing_type": ("sinkhorn",),
        "model.moe_aux_loss_coeff": (0.1,),
    },
    "hash_layers_have_experts": {**EXPERTS, "model.moe_n_hash_layers": 1, "model.expert_interval": 2},
    "balance_has_coefficients": {
        **EXPERTS,
        "model.moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"),
    },
    "upcycled_weights_sum_to_one": {**UPCYCLED, "model.moe_router_pre_softmax": True},
    "upcycled_experts_have_the_mlp_s_width": {**UPCYCLED, "model.moe_ffn_hidden_size": 32},
    "global_batch_multiple": {"batch.global_batch_size": 12},
    "ramp_starts_below_global_batch": {
        "batch.global_batch_size": 16,
        "batch.rampup_batch_size": (24, 8, 100),
    },
    "ramp_whole_increments": {"batch.global_batch_size": 32, "batch.rampup_batch_size": (8, 16, 100)},
    "ramp_increments": {"batch.global_batch_size": 8_000_000, "batch.rampup_batch_size": (8, 8, 10**7)},
    "ramp_multiples": {"batch.global_batch_size": 32, "batch.rampup_batch_size": (8, 4, 100)},
    "batch_steps_begin_and_rise": {"batch.step_batch_size_schedule": ("64:8", "128:16")},
    "batch_steps_end_at_global_batch": {
        "batch.step_batch_size_schedule": ("0:8", "128:16"),
        "batch.global_batch_size": 8,
    },
    "batch_steps_multiples": {"batch.step_batch_size_schedule": ("0:8", "128:11")},
    "samples_fill_a_batch": {"training.train_iters": None, "training.train_samples": 7},
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
    "hpz_divides_data_parallel": {"zero.hpz_partition_size": 3, "zero.stage": 3},
    "quantized_weights_need_masters": {"zero.quantized_weights": "int8", "zero.stage": 2},
    "quantization_block_of_eights": {**CODES, "zero.quantization_block_size": 100},
    "one_size_of_nodes": {
        **CODES,
        "zero.node_size": 2,
        "zero.stage": 3,
        "zero.hpz_partition_size": 4,
    },
    "node_size_divides_data_parallel": {**CODES, "zero.node_size": 3},
    "offload_blocks_are_pages": {"offload.block_size": 5000},
    "training_length_given": {"training.train_iters": None},
    "tokens_countable": {"training.eval_iters": 10**17},
    "decoupled_min_lr_below_lr": {"optimizer.decoupled_lr": 1e-4, "optimizer.min_lr": 5e-4},
    "min_lr_below_lr": {"optimizer.min_lr": 2e-3},
    "warmup_starts_below_lr": {"optimizer.lr_warmup_init": 2e-3},
    "one_lr_unit": {"optimizer.lr_decay_iters": 90, "optimizer.lr_warmup_samples": 9},
    "token_warmup_needs_token_decay": {"optimizer.lr_warmup_tokens": 64},
    "warmup_shorter_than_decay": {"optimizer.lr_warmup_iters": 100},
    "wsd_decay_fits": {
        "optimizer.lr_decay_style": "WSD",
        "optimizer.lr_wsd_decay_iters": 60,
        "optimizer.lr_warmup_iters": 50,
    },
    "weight_decay_grows": {
        "optimizer.start_weight_decay": 0.2,
        "optimizer.end_weight_decay": 0.1,
        "optimizer.weight_decay_incr_style": "linear",
    },
    "lamb_bounds_ordered": {"optimizer.optimizer": "lamb", "optimizer.lamb_min_coeff": 11.0},
    "muon_quintic_in_fives": {"optimizer.optimizer": "muon", "optimizer.muon_num_ns_steps": 6},
    "onebit_lamb_factors_ordered": {
        "optimizer.optimizer": "onebit-lamb",
        "optimizer.onebit_lamb_factor_min": 5.0,
    },
    "min_loss_scale_below_initial": {"precision.min_loss_scale": 8.0, "precision.initial_loss_scale": 4.0},
    "recompute_units_within_model": {"recompute.granularity": "full", "recompute.num_layers": 5},
    "recompute_modules_are_there": {
        "recompute.granularity": "selective",
        "recompute.modules": ("moe",),
    },
    "written_to_local_paths": {"logging.metrics_jsonl": "s3://bucket/metrics.jsonl"},
    "data_source_given": {"data.data_path": ()},
    "prepared_index_of_one_dataset": {
        **{f"data.train_{kind}_idx_path": f"{kind}.npy" for kind in ("doc", "sample", "shuffle")},
        "data.data_path": ("a", "b"),
    },
    "one_data_source": {"data.mock_data": True},
    "training_data_given": {"data.data_path": (), "data.valid_data_path": ("v",)},
    "blend_in_pairs": {"data.data_path": ("0.5", "a", "b")},
    "room_for_special_tokens": {"model.family": "bert", "model.seq_length": 4},
    "task_has_data": {**TASK, "finetune.train_data": ()},
    "one_or_two_text_columns": {**TASK, "finetune.text_columns": ("a", "b", "c")},
    "choices_for_multiple_choice": {**TASK, "finetune.choice_columns": ("a", "b")},
    "labels_differ": {**TASK, "finetune.labels": ("a", "a")},
    "classes_are_the_labels": {**TASK, "model.num_classes": 2},
    "sequence_holds_marks_and_text": {**TASK, "model.seq_length": 4},
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
    "seqlen_custom_is_a_pacing": {
        "curriculum.seqlen_schedule": "custom",
        "curriculum.seqlen_custom_schedule": "math:no_such_function",
    },
    "metric_has_its_index": metric(index_to_metric_path=""),
    "metric_is_sampled_by": metric(clustering_type="single_cluster"),
    "metric_ramp_has_its_numbers": metric(max_difficulty=None),
    "metric_root_has_a_degree": metric(schedule_type="fixed_root"),
    "metric_levels_fit": metric(**{**LEVELS, "max_step": (3, 4)}),
    "metric_difficulty_grows": metric(min_difficulty=501),
    "percentile_within_hundred": metric(difficulty_type="percentile"),
    "metric_changes_countable": metric(max_difficulty=10**9),
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
    "sparse_blocks_divide_sequence": {**FIXED, "model.sparse_block": 12},
    "sparse_direction_of_model": {**FIXED, "model.sparse_direction": "bidirectional"},
    "sparse_global_blocks_fit": {**FIXED, "model.sparse_num_global_blocks": 3},
    "sparse_patterns_fit": {
        **FIXED,
        "model.sparse_different_layout_per_head": True,
        "model.sparse_num_different_global_patterns": 5,
    },
    "sparse_layouts_differ": {**FIXED, "model.sparse_different_layout_per_head": True},
    "sparse_random_blocks_fit": {**BIGBIRD, "model.sparse_num_random_blocks": 9},
    "sparse_seed_draws": {**BIGBIRD, "model.sparse_seed": 1},
    "sparse_global_runs_exist": {
        **SPARSE,
        "model.sparse_attention": "bslongformer",
        "model.sparse_global_block_indices": (8,),
    },
    "sparse_window_fits": {**BIGBIRD, "model.sparse_num_sliding_window_blocks": 9},
    "t5_alone": {**PAIRS, "model.softmax_type": "off-by-one"},
    "stacks_add_up": {**PAIRS, "model.t5_encoder_layers": 3, "model.t5_decoder_layers": 2},
    "decoder_fits": {**PAIRS, "model.t5_decoder_seq_length": 33},
    "relative_kinds": {**RELATIVE, "model.t5_relative_buckets": 32, "model.t5_relative_distance": 16},
}

# Combinations near a rule's border that must run.
ACCEPTED: list[dict[str, Any]] = [
    {},
    {**RAMP, "curriculum.seqlen_total_curriculum_step": 10**6},
    metric(total_curriculum_step=101),
    {**DROPS, "skipping.random_ltd_require_steps": 10**6},
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
    {"model.position_embedding_type": "rope", "model.use_rope_scaling": True},
    {"model.position_embedding_type": "yarn", "model.yarn_beta_slow": 31.0},
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
    {"data.pack": "best-fit", "data.reset_attention_mask": True},
    {
        **EXTENDED,
        "model.rotary_scaling_factor": 4.0,
        "model.yarn_original_max_position_embeddings": 8,
    },
    {**EXTENDED, "model.position_embedding_type": "rope"},
    {"data.data_path": (), "data.mock_data": True},
    {"data.data_path": (), "data.valid_data_path": ("v",), "training.skip_train": True},
    {"data.data_path": (), "data.train_data_path": ("1", "a", "2", "b"), "data.valid_data_path": ("v",)},
    {"recompute.granularity": "full", "recompute.method": "block", "recompute.num_layers": 4},
    {"recompute.granularity": "full", "recompute.partition_activations": True, "recompute.offload": True},
    {
        **EXPERTS,
        "recompute.granularity": "selective",
        "recompute.modules": ("moe_act", "layernorm", "shared_experts"),
        "model.moe_shared_expert_intermediate_size": 16,
    },
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
    {**CODES, "zero.quantization_rounding": "stochastic", "zero.node_size": 2},
    {"zero.stage": 3, "zero.quantized_weights": "fp8", "zero.quantization_block_size": 4096},
    {"precision.dtype": "bf16", "zero.stage": 1, "zero.quantized_weights": "int4"},
    {**CODES, "zero.stage": 3, "zero.hpz_partition_size": 2, "zero.node_size": 2},
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
        "model.moe_min_capacity": 9,
    },
    {**EXPERTS, "model.moe_min_capacity": 4, "model.moe_token_drop_policy": "position"},
    {**EXPERTS, "model.mlp_type": "residual", "model.family": "bert"},
    {**EXPERTS, **TASK},
    {"offload.optimizer": "cpu", "offload.fraction": 0.25, "offload.gradients": "none"},
    {**DELAYED, "offload.delayed_param_update_start": 0, "zero.stage": 2, "precision.dtype": "bf16"},
    {"zero.stage": 3, "offload.parameters": "nvme", "offload.path": "d", "offload.block_size": 4096},
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
    {**COMPILED, "recompute.granularity": "selective", "acceleration.compile_backend": "aot_eager"},
    {**COMPILED, "guards.check_host_waits": "warn", "parallel.device": "cuda"},
    {**FP8, "precision.fp8_amax_history_len": 16, "precision.fp8_amax_compute_algo": "max"},
    {**FP8, "precision.first_last_layers_bf16": True, "precision.num_layers_at_end_in_bf16": 0},
    {**GRAPHED, **FP8, "zero.stage": 2, "recompute.granularity": "selective"},
    {**RELATIVE, "model.t5_style": "google"},
    {**RELATIVE, "model.t5_relative_buckets": 4, "model.t5_relative_distance": 3},
    {**RELATIVE, "model.t5_relative_buckets": 32, "model.t5_relative_distance": 17},
    {**PAIRS, "model.t5_encoder_layers": 1, "model.t5_decoder_layers": 3, "model.t5_decoder_seq_length": 32},
]
