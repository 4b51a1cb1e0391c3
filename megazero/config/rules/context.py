"""Rules about sequences that several ranks share."""

from __future__ import annotations

import math

from megazero.config.derive import sequence_multiple
from megazero.config.fields import paths
from megazero.config.rules.rule import Case, rule

_FINETUNE, _MODEL, _PARALLEL, _SKIPPING = paths.finetune, paths.model, paths.parallel, paths.skipping

_SIZE, _TYPES = _PARALLEL.context_parallel_size, _PARALLEL.cp_comm_type
_TENSOR, _HEADS = _PARALLEL.tensor_model_parallel_size, _MODEL.num_attention_heads


def _shared(case: Case) -> bool:
    return case.parallel.context_parallel_size > 1


@rule(
    (_MODEL.seq_length, _SIZE, _TYPES, _TENSOR, _PARALLEL.sequence_parallel),
    "change the length or a size, or leave out `--sequence-parallel`",
    detail=lambda c: f"it must be a multiple of {sequence_multiple(c.parallel)}",
)
def sequence_over_ranks(case: Case) -> bool:
    """`seq_length` must divide evenly over the ranks that share a sequence: into 2 x `context_parallel_size`
    pieces (one for each rank, if all layers send a2a), whose rows `tensor_model_parallel_size` must divide
    with `sequence_parallel`"""
    return case.model.seq_length % sequence_multiple(case.parallel) == 0


@rule((_TYPES, _MODEL.num_layers), "give one for all, or as many as there are layers")
def cp_comm_types_count(case: Case) -> bool:
    """`cp_comm_type` must be one word, or one for each of `num_layers`"""
    return len(case.parallel.cp_comm_type) in (1, case.model.num_layers)


@rule(
    (_TYPES, _PARALLEL.hierarchical_context_parallel_sizes, _SIZE),
    "give the ranks of a block and the number of blocks",
)
def cp_blocks_given(case: Case) -> bool:
    """`cp_comm_type` a2a+p2p must have `hierarchical_context_parallel_sizes`"""
    parallel = case.parallel
    wanted = _shared(case) and "a2a+p2p" in parallel.cp_comm_type
    return not wanted or parallel.hierarchical_context_parallel_sizes is not None


@rule((_PARALLEL.hierarchical_context_parallel_sizes, _SIZE), "change one of them")
def cp_blocks_multiply(case: Case) -> bool:
    """the product of `hierarchical_context_parallel_sizes` must be `context_parallel_size`"""
    blocks = case.parallel.hierarchical_context_parallel_sizes
    return blocks is None or math.prod(blocks) == case.parallel.context_parallel_size


@rule(
    (_TYPES, _HEADS, _TENSOR, _SIZE, _PARALLEL.hierarchical_context_parallel_sizes),
    "use fewer ranks, p2p, or a2a+p2p with smaller blocks",
)
def heads_over_context_ranks(case: Case) -> bool:
    """the heads of a tensor-parallel rank must be at least as many as the ranks that exchange heads"""
    parallel = case.parallel
    heads = case.model.num_attention_heads // parallel.tensor_model_parallel_size
    block = (parallel.hierarchical_context_parallel_sizes or (1, 1))[0]
    ranks = {"a2a": parallel.context_parallel_size, "a2a+p2p": block}
    return not _shared(case) or all(heads >= ranks.get(kind, 1) for kind in parallel.cp_comm_type)


@rule(
    (_SIZE, _SKIPPING.random_ltd, _MODEL.window_size, _MODEL.position_embedding_type),
    "leave one of the three out: the distances of kept tokens are those of all, which no rank has",
)
def random_ltd_attends_to_all_it_keeps(case: Case) -> bool:
    """`random_ltd` must go without windows and linear biases where ranks share sequences"""
    by_distance = case.model.has_windows or case.model.position_embedding_type == "alibi"
    return not (_shared(case) and case.config.skipping.random_ltd and by_distance)


@rule((_SIZE, _FINETUNE.task), "leave out `--context-parallel-size`: samples of other tasks are short")
def finetuning_shares_no_sequences(case: Case) -> bool:
    """`context_parallel_size` must be 1 for fine-tuning on a task other than chat and preference"""
    return not _shared(case) or case.config.finetune.task in (None, "chat", "preference")
