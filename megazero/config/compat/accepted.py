"""Foreign flags that are accepted without effect: the rows, grouped by reason.

`ACCEPTED`: reason -> flags; a trailing `=` marks a flag that takes one value.
`CONDITIONAL`: flag -> (when, the reason, what to do otherwise). `when` lists values, or names a
flag that must be given too, or states `section.field=value` of the tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

ACCEPTED: Mapping[str, str] = MappingProxyType(
    {
        "there is one engine, with and without pipeline stages": """
            --use-mcore-models --use-legacy-models --no-contiguous-buffers-in-local-ddp
            --no-scatter-gather-tensors-in-pipeline --overlap-p2p-communication --use-ring-exchange-p2p""",
        "the fastest kernel that is built is used, and all kernels compute the same": """
            --use-flash-attn --use-flash-attn-v1 --use-flash-attn-v2 --use-flash-attn-triton
            --use-flash-attn-builder --attention-backend= --no-masked-softmax-fusion --no-bias-dropout-fusion
            --no-bias-swiglu-fusion --no-rope-fusion --no-gradient-accumulation-fusion
            --cross-entropy-loss-fusion --cross-entropy-fusion-impl= --no-persist-layer-norm
            --disable-mem-efficient-ln --ds_fused_adam""",
        "overlapping communication changes only the speed": """
            --no-async-tensor-model-parallel-allreduce --tp-comm-overlap""",
        "the softmax of attention is always computed in fp32": """
            --attention-softmax-in-fp32 --no-query-key-layer-scaling --apply-query-key-layer-scaling""",
        "initial weights depend on the seed and the parameter's name alone": """
            --use-cpu-initialization --no-initialization""",
        "the loader reads ahead, over an index that covers the whole training": """
            --repeated-dataloader --mmap-warmup --no-mmap-bin-files --num-dataset-builder-threads=
            --no-create-attention-mask-in-dataloader --use-pin-memory""",
        "tokenizers are read from files, and no code that comes with them is run": "--trust-remote-code",
        "SIGTERM always saves and exits": "--exit-signal-handler",
        "every step is checked for inf and nan": "--no-check-for-nan-in-loss-and-grad",
        "checkpoints have one format, which any layout loads": """
            --ckpt-format= --dist-ckpt-format= --use-dist-ckpt --universal-checkpoint""",
        "the rank comes from the environment that torchrun sets": "--local_rank= --local-rank=",
        "memory housekeeping is left to torch": """
            --empty-unused-memory-level= --manual-gc --manual-gc-interval= --contigious-checkpointing
            --synchronize-each-layer --split-transformers --scattered-embeddings""",
        "the set of metrics is fixed, and training is the same without these": """
            --log-batch-size-to-tensorboard --log-optimizer-states-to-tensorboard --log-memory-to-tensorboard
            --log-world-size-to-tensorboard --no-log-learnig-rate-to-tensorboard
            --no-log-learning-rate-to-tensorboard --no-log-loss-scale-to-tensorboard
            --log-learning-rate-to-tensorboard --log-loss-scale-to-tensorboard --timing-log-level=
            --timing-log-option= --no-barrier-with-level-1-timing --log-throughput --log-progress
            --no-one-logger""",
        "gradients are always kept in flat buffers, and are reduce-scattered wherever they are sharded": """
            --zero-contigious-gradients --zero-reduce-scatter""",
        "reductions and gathers share the buckets of `--bucket-size`": "--zero-allgather-bucket-size=",
        "zero-bubble schedules are always exact": "--enable-zbh1-exact-semantics",
        "it matters only with experts, and there are none": """
            --moe-loss-coeff= --moe-train-capacity-factor= --moe-eval-capacity-factor= --moe-min-capacity=
            --create-moe-param-group --disable-moe-token-dropping --disable-moe-top2-2nd-expert-sampling
            --enable-expert-tensor-parallelism --expert-interval= --topk= --mlp-type= --use-tutel""",
    }
)

CONDITIONAL: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "--DDP-impl": (
            "local torch",
            "there is one data-parallel engine",
            "shard with `--zero-stage 3`, and use `--DDP-impl local` or leave it out",
        ),
        "--data-impl": (
            "mmap infer",
            "datasets are memory-mapped",
            "the lazy and cached formats cannot be read; convert the corpus with preprocess_data.py",
        ),
        "--transformer-impl": (
            "local transformer_engine",
            "layers have one implementation",
            "choose local or transformer_engine, or leave it out",
        ),
        "--no-pipeline-parallel": (
            "parallel.pipeline_model_parallel_size=1",
            "there is one engine, with and without pipeline stages",
            "it contradicts `--pipeline-model-parallel-size`; leave one of the two out (ZeRO stages 2 and 3 "
            "run under pipeline stages too)",
        ),
        "--num-experts": (
            "1",
            "one expert is the dense model",
            "mixture of experts comes in a later version; use `--num-experts 1` or leave it out",
        ),
        "--remote-device": (
            "none",
            "nothing is offloaded",
            "offload comes in a later version; leave it out",
        ),
        "--group-query-attention": (
            "--num-query-groups",
            "`--num-query-groups` says the same",
            "say how many key/value heads there are with `--num-query-groups`",
        ),
    }
)
