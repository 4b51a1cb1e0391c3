"""Defaults that are not simply those of Megatron-LM and Megatron-DeepSpeed, and why.

Where both give a setting the same default, it is the default here. These are the settings where they differ,
or where neither's default would do. `docs/configuration.md` lists them, and `tests/config/test_defaults.py`
holds the defaults of both for all settings.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """One default that was decided here.

    Attributes:
        path: the setting.
        here: the meaning of an unset setting, in words.
        megatron_lm: the default of Megatron-LM, in words.
        megatron_deepspeed: the default of Megatron-DeepSpeed, in words.
        why: the reason, as a clause.
    """

    path: str
    here: str
    megatron_lm: str
    megatron_deepspeed: str
    why: str


_NO_FLAG = "has no such flag"
_SUMS = "fp16 with `--fp16`, else fp32"

DECISIONS: tuple[Decision, ...] = (
    Decision(
        "model.max_position_embeddings",
        "the sequence length",
        "required",
        "required",
        "no other value fits every model, and a longer table must be asked for",
    ),
    Decision(
        "model.moe_layer_freq",
        "1, or none with `--expert-interval`",
        "1",
        _NO_FLAG,
        "experts are placed as in Megatron-LM unless the launch line is Megatron-DeepSpeed's; the two count "
        "layers differently",
    ),
    Decision(
        "model.expert_interval",
        "none: `--moe-layer-freq` says it",
        _NO_FLAG,
        "2",
        "experts are placed as in Megatron-LM unless the launch line is Megatron-DeepSpeed's",
    ),
    Decision(
        "model.moe_router_topk",
        "2",
        "2",
        "1",
        "it goes with the flag's name; a line of Megatron-DeepSpeed's has 1",
    ),
    Decision(
        "model.moe_aux_loss_coeff",
        "0.0",
        "0.0",
        "0.1",
        "a loss is added only if it is asked for; scripts of both give it",
    ),
    Decision(
        "model.moe_router_sampling",
        "none",
        _NO_FLAG,
        "second, where there are two",
        "a choice without noise is what Megatron-LM's users expect, and it is the same in evaluation",
    ),
    Decision(
        "model.moe_expert_capacity_factor",
        "none, so that no token is dropped",
        "none",
        "1.0",
        "tokens are dropped only if it is asked for",
    ),
    Decision(
        "model.moe_eval_capacity_factor",
        "that of the training",
        _NO_FLAG,
        "1.0",
        "a model is evaluated as it is trained unless it is asked for otherwise",
    ),
    Decision(
        "model.moe_min_capacity",
        "0",
        _NO_FLAG,
        "4",
        "Megatron-LM's capacity has no floor; a factor alone gives the same here",
    ),
    Decision(
        "guards.check_weights_interval",
        "500",
        "never",
        _NO_FLAG,
        "ranks that train different models are found in time, and it costs less than a thousandth of a step",
    ),
    Decision(
        "parallel.expert_tensor_parallel_size",
        "the tensor-parallel size",
        "the tensor-parallel size",
        "1",
        "only memory and speed depend on it; `--expert-tensor-parallel-size 1` keeps experts whole",
    ),
    Decision(
        "parallel.moe_token_dispatcher_type",
        "alltoall",
        "allgather",
        "alltoall (there is no other)",
        "it sends only what is needed, and what a token gets does not depend on how experts are shared",
    ),
    Decision(
        "parallel.distributed_backend",
        "auto",
        "nccl",
        "nccl",
        "auto is nccl wherever there is CUDA; on a CPU, where both fail, it is gloo",
    ),
    Decision(
        "zero.stage",
        "0",
        "0 (`--use-distributed-optimizer` is off)",
        "1",
        "nothing is sharded that was not asked for; a DeepSpeed JSON sets it, as it does there",
    ),
    Decision(
        "zero.bucket_size",
        "16000000",
        "max(40000000, 1000000 x data-parallel size)",
        "0",
        "only speed and memory depend on it",
    ),
    Decision(
        "zero.overlap_grad_reduce", "on", "off", _NO_FLAG, "only speed depends on it, and the sums do not"
    ),
    Decision(
        "zero.overlap_param_gather", "on", "off", _NO_FLAG, "only speed depends on it, and the values do not"
    ),
    Decision(
        "zero.grad_accumulation_dtype",
        "fp32",
        _SUMS,
        _SUMS,
        "sums of many micro-batches in fp16 overflow and lose small terms; `--main-grads-dtype fp16` gives "
        "them",
    ),
    Decision(
        "zero.grad_reduce_dtype",
        "fp32",
        _SUMS,
        _SUMS,
        "what the replicas add up should not depend on how many there are; `--grad-reduce-dtype` changes it",
    ),
    Decision(
        "recompute.method",
        "uniform",
        "required with full",
        "required with full",
        "whole layers one at a time is what full recompute means to most",
    ),
    Decision("recompute.num_layers", "1", "required with full", "1", "the smallest unit needs least memory"),
    Decision(
        "tokenizer.tokenizer_type",
        "GPT2BPETokenizer (BERT: BertWordPieceLowerCase), or none with `--vocab-size` and no files",
        "GPT2BPETokenizer (BERT: BertWordPieceLowerCase)",
        "GPT2BPETokenizer (BERT: BertWordPieceLowerCase)",
        "data that are token ids already need no tokenizer's files",
    ),
    Decision(
        "data.data_sharding",
        "off",
        "on",
        "on",
        "a cyclic order must not depend on the number of ranks; `--data-sharding` gives theirs",
    ),
    Decision(
        "training.eval_interval",
        "1000",
        "never",
        "1000",
        "a run that validates says how well it goes; `--eval-iters 0` turns it off",
    ),
    Decision(
        "finetune.task",
        "none, which is pretraining",
        _NO_FLAG,
        "required by `tasks/main.py`",
        "one tree describes both kinds of training; `finetune.py` requires it",
    ),
    Decision(
        "finetune.epochs",
        "3",
        _NO_FLAG,
        "required to train",
        "as many as Devlin et al. (2019) fine-tuned for",
    ),
)
