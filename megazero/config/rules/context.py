"""Rules about sequences that several ranks share."""

from __future__ import annotations

import math

from megazero.config.derive import sequence_multiple
from megazero.config.fields import paths
from megazero.config.rules.rule import Case, Rule

_FINETUNE, _MODEL, _PARALLEL, _SKIPPING = paths.finetune, paths.model, paths.parallel, paths.skipping

_SIZE, _TYPES = _PARALLEL.context_parallel_size, _PARALLEL.cp_comm_type
_TENSOR, _HEADS = _PARALLEL.tensor_model_parallel_size, _MODEL.num_attention_heads


def _shared(case: Case) -> bool:
    return case.config.parallel.context_parallel_size > 1


def _blocks_given(case: Case) -> bool:
    parallel = case.config.parallel
    wanted = _shared(case) and "a2a+p2p" in parallel.cp_comm_type
    return not wanted or parallel.hierarchical_context_parallel_sizes is not None


def _blocks_multiply(case: Case) -> bool:
    blocks = case.config.parallel.hierarchical_context_parallel_sizes
    return blocks is None or math.prod(blocks) == case.config.parallel.context_parallel_size


def _heads_enough(case: Case) -> bool:
    parallel = case.config.parallel
    heads = case.config.model.num_attention_heads // parallel.tensor_model_parallel_size
    block = (parallel.hierarchical_context_parallel_sizes or (1, 1))[0]
    ranks = {"a2a": parallel.context_parallel_size, "a2a+p2p": block}
    return not _shared(case) or all(heads >= ranks.get(kind, 1) for kind in parallel.cp_comm_type)


def _by_distance(case: Case) -> bool:
    model = case.config.model
    return model.has_windows or model.position_embedding_type == "alibi"


CONTEXT_RULES: tuple[Rule, ...] = (
    Rule(
        "sequence_over_ranks",
        (_MODEL.seq_length, _SIZE, _TYPES, _TENSOR, _PARALLEL.sequence_parallel),
        "`seq_length` must divide evenly over the ranks that share a sequence: into 2 x "
        "`context_parallel_size` pieces (one for each rank, if all layers send a2a), whose rows "
        "`tensor_model_parallel_size` must divide with `sequence_parallel`",
        "change the length or a size, or leave out `--sequence-parallel`",
        lambda c: c.config.model.seq_length % sequence_multiple(c.config.parallel) == 0,
        lambda c: f"it must be a multiple of {sequence_multiple(c.config.parallel)}",
    ),
    Rule(
        "cp_comm_types_count",
        (_TYPES, _MODEL.num_layers),
        "`cp_comm_type` must be one word, or one for each of `num_layers`",
        "give one for all, or as many as there are layers",
        lambda c: len(c.config.parallel.cp_comm_type) in (1, c.config.model.num_layers),
    ),
    Rule(
        "cp_blocks_given",
        (_TYPES, _PARALLEL.hierarchical_context_parallel_sizes, _SIZE),
        "`cp_comm_type` a2a+p2p must have `hierarchical_context_parallel_sizes`",
        "give the ranks of a block and the number of blocks",
        _blocks_given,
    ),
    Rule(
        "cp_blocks_multiply",
        (_PARALLEL.hierarchical_context_parallel_sizes, _SIZE),
        "the product of `hierarchical_context_parallel_sizes` must be `context_parallel_size`",
        "change one of them",
        _blocks_multiply,
    ),
    Rule(
        "heads_over_context_ranks",
        (_TYPES, _HEADS, _TENSOR, _SIZE, _PARALLEL.hierarchical_context_parallel_sizes),
        "the heads of a tensor-parallel rank must be at least as many as the ranks that exchange heads",
        "use fewer ranks, p2p, or a2a+p2p with smaller blocks",
        _heads_enough,
    ),
    Rule(
        "random_ltd_attends_to_all_it_keeps",
        (_SIZE, _SKIPPING.random_ltd, _MODEL.window_size, _MODEL.position_embedding_type),
        "`random_ltd` must go without windows and linear biases where ranks share sequences",
        "leave one of the three out: the distances of kept tokens are those of all, which no rank has",
        lambda c: not (_shared(c) and c.config.skipping.random_ltd and _by_distance(c)),
    ),
    Rule(
        "finetuning_shares_no_sequences",
        (_SIZE, _FINETUNE.task),
        "`context_parallel_size` must be 1 for fine-tuning on a task",
        "leave out `--context-parallel-size`: samples of tasks are short",
        lambda c: not _shared(c) or c.config.finetune.task is None,
    ),
)
