"""Foreign flags that are accepted without effect: the rows, grouped by reason.

`ACCEPTED`: reason -> flags. A mark at a flag's end says how many values follow it: none without a mark,
`=` one, `=?` at most one, `=*` any number.
`CONDITIONAL`: flag -> (when, the reason, what to do otherwise). `when` lists values, or states
`section.field=value` or `section.field!=value` of the tree; of several of these, with `or` between them, one
must hold. `SILENT`: those that have their effect through the setting that `when` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

ACCEPTED: Mapping[str, str] = MappingProxyType(
    {
        "there is one engine, with and without pipeline stages": """
            --use-mcore-models --use-legacy-models --no-contiguous-buffers-in-local-ddp
            --enable-experimental --no-scatter-gather-tensors-in-pipeline --overlap-p2p-communication
            --use-ring-exchange-p2p""",
        "a sample's number is always known": "--return-data-index",
        "the fastest kernel that is built is used, and all kernels compute the same": """
            --use-flash-attn --use-flash-attn-v1 --use-flash-attn-v2 --use-flash-attn-triton
            --use-flash-attn-builder --no-masked-softmax-fusion --no-bias-dropout-fusion
            --no-bias-swiglu-fusion --no-rope-fusion --no-gradient-accumulation-fusion
            --cross-entropy-loss-fusion --no-persist-layer-norm --disable-mem-efficient-ln
            --ds_fused_adam --use-torch-optimizer-for-cpu-offload --cpu_torch_adam=*
            --bias-activation-fusion --bias-dropout-fusion --apply-rope-fusion
            --masked-softmax-fusion --persist-layer-norm --memory-efficient-layer-norm
            --gradient-accumulation-fusion --fused-residual-rmsnorm --fused-single-qkv-rope
            --use-transformer-engine-op-fuser --muon-use-syrk --use-fused-weighted-squared-relu
            --use-grouped-gemm-for-dense-mlp --disable-jit-fuser --disable-parameter-transpose-cache
            --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion --use-tutel
            --use-grouped-gemm-for-shared-expert --moe-mlp-glu-interleave-size=
            --moe-shared-expert-glu-interleave-size=""",
        "the weights of a layer's experts are always one tensor": """
            --moe-use-grouped-tensor --moe-single-grouped-bias --moe-single-grouped-weight""",
        "parameters say themselves whether they are an expert's": "--create-moe-param-group",
        "CUDA graphs change only the speed, and `--cuda-graph` launches them": """
            --cuda-graph-impl= --cuda-graph-scope=* --cuda-graph-modules=* --cuda-graph-warmup-steps=
            --cuda-graph-retain-backward-graph --enable-cuda-graph --external-cuda-graph
            --no-cuda-graph-use-single-mempool --optimizer-cuda-graph""",
        "`--muon-ns-dtype` says how exact the products are": "--muon-fp32-matmul-prec=",
        "the order of work and of communication changes only the speed": """
            --no-async-tensor-model-parallel-allreduce --tp-comm-overlap --tp-comm-overlap-cfg=
            --tp-comm-atomic-ag --tp-comm-atomic-rs --tp-comm-bootstrap-backend=
            --tp-comm-overlap-disable-fc1 --tp-comm-overlap-disable-qkv --tp-comm-overlap-rs-dgrad
            --no-tp-comm-bulk-dgrad --no-tp-comm-bulk-wgrad --no-tp-comm-overlap-ag
            --no-tp-comm-overlap-rs --no-tp-comm-split-ag --no-tp-comm-split-rs
            --defer-embedding-wgrad-compute --wgrad-deferral-limit= --delay-wgrad-compute
            --overlap-p2p-comm --no-overlap-p2p-communication --overlap-p2p-communication-warmup-flush
            --no-batch-p2p-comm --no-batch-p2p-sync --microbatch-group-size-per-virtual-pipeline-stage=
            --overlap-param-gather-with-optimizer-step --high-priority-stream-groups=* --use-sharp
            --sharp-enabled-group= --use-nccl-ub --disable-symmetric-registration --symmetric-ar-type=
            --train-sync-interval= --disable-gloo-process-groups --torch-fsdp2-no-reshard-after-forward
            --overlap-cpu-optimizer-d2h-h2d
            --moe-shared-expert-overlap --overlap-moe-expert-parallel-comm
            --overlap-dispatch-backward-with-experts-wgrad --high-priority-a2a-comm-stream
            --ep-overlap-early-attn-memory-release""",
        "the order of ranks is fixed, tensor, data, pipeline, and does not change the numbers": """
            --use-tp-pp-dp-mapping""",
        "the loss is the mean over all tokens of the global batch that are not masked": """
            --calculate-per-token-loss""",
        "the softmax of attention is always computed in fp32": """
            --attention-softmax-in-fp32 --no-query-key-layer-scaling --apply-query-key-layer-scaling""",
        "initial weights depend on the seed and the parameter's name alone": """
            --use-cpu-initialization --no-initialization --init-model-with-meta-device""",
        "random numbers are a function of the seed and the place where they are used": """
            --te-rng-tracker --use-te-rng-tracker --inference-rng-tracker""",
        "the loader reads ahead, over an index that covers the whole training": """
            --repeated-dataloader --mmap-warmup --no-mmap-bin-files --num-dataset-builder-threads=
            --no-create-attention-mask-in-dataloader --use-pin-memory --dataloader-defer-npy-index-mmap
            --dataloader-fast-cache-load --per-dataset-sequences-path=
            --exit-signal-handler-for-dataloader""",
        "tokenizers are read from files, and no code that comes with them is run": "--trust-remote-code",
        "training reads token ids, and text is tokenized before": """
            --tokenizer-hf-no-use-fast --tokenizer-hf-no-include-special-tokens
            --tokenizer-sentencepiece-legacy --no-tokenizer-sentencepiece-ignore-extra-whitespaces
            --use-gigatoken --allow-ambiguous-pad-tokens --legacy-tokenizer""",
        "SIGTERM always saves and exits": "--exit-signal-handler --exit-signal-handler-for-training",
        "spikes of the loss and of the gradient norm are reported": """
            --check-for-spiky-loss --check-for-large-grads""",
        "ranks are always compared, at every `--straggler-interval`, and each that is slow is named": """
            --log-straggler --disable-straggler-on-startup --straggler-ctrlr-port=
            --straggler-minmax-count=""",
        "every step is checked for inf and nan": """
            --no-check-for-nan-in-loss-and-grad --no-check-for-nan-in-loss""",
        "checkpoints have one format, which all ranks write and any layout loads": """
            --use-dist-ckpt --universal-checkpoint --auto-detect-ckpt-format
            --ckpt-assume-constant-structure --no-ckpt-fully-parallel-save --ckpt-fully-parallel-save
            --ckpt-fully-parallel-load --ckpt-fully-parallel-load-exchange-algo=
            --ckpt-fully-parallel-load-per-rank-objects --ckpt-fully-parallel-load-process-group=
            --ckpt-fully-parallel-save-process-group= --ckpt-pg-tensors-cache-create
            --ckpt-pg-tensors-cache-path= --dist-ckpt-optim-fully-reshardable
            --dist-ckpt-save-pre-mcore-014 --distrib-optim-fully-reshardable-mem-efficient
            --no-ckpt-load-validate-sharding-integrity --no-strict-fsdp-dtensor-load
            --ckpt-drop-redundant-extra-state --dist-ckpt-workers= --dist-ckpt-use-dtensor-format""",
        "how a checkpoint is written in the background changes only the speed": """
            --use-persistent-ckpt-worker --async-strategy= --async-ckpt-cpu-priority=
            --async-ckpt-io-priority= --async-ckpt-use-cpu-shm""",
        "neither settings nor tokenizers are kept in checkpoints": """
            --no-use-tokenizer-model-from-checkpoint-args --no-save-tokenizer-assets""",
        "the rank comes from the environment that torchrun sets": "--local_rank= --local-rank=",
        "memory housekeeping is left to torch": """
            --empty-unused-memory-level= --manual-gc --manual-gc-interval= --no-manual-gc-eval
            --contigious-checkpointing --synchronize-each-layer --split-transformers
            --scattered-embeddings --deallocate-pipeline-outputs --no-clone-scatter-output-in-embedding""",
        "the set of metrics and messages is fixed, and training is the same without these": """
            --log-batch-size-to-tensorboard --log-optimizer-states-to-tensorboard
            --log-memory-to-tensorboard --log-world-size-to-tensorboard
            --no-log-learnig-rate-to-tensorboard --no-log-learning-rate-to-tensorboard
            --no-log-loss-scale-to-tensorboard --log-learning-rate-to-tensorboard
            --log-loss-scale-to-tensorboard --timing-log-level= --timing-log-option=
            --no-barrier-with-level-1-timing --log-throughput --log-progress --no-one-logger
            --one-logger-async --one-logger-project= --one-logger-run-name= --app-tag-run-name=
            --app-tag-run-version= --log-device-memory-used --log-energy
            --log-l2-norm-grad-to-tensorboard --log-max-attention-logit --log-memory-interval=
            --log-runtime-to-tensorboard --log-throughput-to-tensorboard --memory-keys=
            --runtime-time-unit= --throughput-window-size= --logging-level= --modules-to-filter=*
            --set-level-for-all-loggers --no-filter-warnings --moe-per-layer-logging""",
        "gradients are always kept in flat buffers, and are reduce-scattered wherever they are sharded": """
            --zero-contigious-gradients --zero-reduce-scatter --no-align-grad-reduce
            --no-align-param-gather --no-gradient-reduce-div-fusion --ddp-average-in-collective
            --ddp-pad-buckets-for-high-nccl-busbw --no-use-layer-wise-param-layout
            --create-all-gather-group""",
        "reductions and gathers share the buckets of `--bucket-size`": """
            --zero-allgather-bucket-size= --ddp-num-buckets=""",
        "what is sharded is sharded over all data-parallel ranks": "--num-distributed-optimizer-instances=",
        "the types of weights, gradients and optimizer state are settings of their own": """
            --use-precision-aware-optimizer""",
        "zero-bubble schedules are always exact": "--enable-zbh1-exact-semantics",
    }
)

CONDITIONAL: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "--muon-tp-mode=": (
            "duplicated distributed",
            "Muon looks at whole matrices, however they are cut",
            "choose duplicated, which gives the same numbers with any tensor-parallel size, or leave it out",
        ),
        "--DDP-impl=": (
            "local torch",
            "there is one data-parallel engine",
            "shard with `--zero-stage 3`, and use `--DDP-impl local` or leave it out",
        ),
        "--data-impl=": (
            "mmap infer",
            "datasets are memory-mapped",
            "the lazy and cached formats cannot be read; convert the corpus with preprocess_data.py",
        ),
        "--transformer-impl=": (
            "local transformer_engine",
            "layers have one implementation",
            "choose local or transformer_engine, or leave it out",
        ),
        "--attention-backend=": (
            "auto flash fused unfused local",
            "the fastest kernel that is built is used, and all kernels compute the same",
            "choose auto or leave it out",
        ),
        "--flash-attention-version=": (
            "2 3 4",
            "the fastest kernel that is built is used, and all kernels compute the same",
            "leave it out",
        ),
        "--cross-entropy-fusion-impl=": (
            "native te",
            "the fastest kernel that is built is used, and all kernels compute the same",
            "choose native or leave it out",
        ),
        "--ckpt-format=": (
            "torch torch_dist torch_dcp fsdp_dtensor zarr",
            "checkpoints have one format, which all ranks write and any layout loads",
            "leave it out",
        ),
        "--dist-ckpt-format=": (
            "torch_dist zarr",
            "checkpoints have one format, which all ranks write and any layout loads",
            "leave it out",
        ),
        "--dist-ckpt-strictness=": (
            "assume_ok_unexpected log_unexpected log_all raise_unexpected raise_all return_unexpected "
            "return_all ignore_all",
            "a checkpoint is loaded only if it holds exactly what the model has",
            "choose raise_all or leave it out",
        ),
        "--verify-integrity": (
            "checkpoint.verify_checkpoint=full",
            "checkpoints are written with hashes, which are checked when they are read",
            "it contradicts `--verify-checkpoint size`; leave one of the two out",
        ),
        "--use-checkpoint-opt_param-scheduler": (
            "checkpoint.override_opt_param_scheduler=False",
            "a run that is continued keeps its checkpoint's schedule",
            "it contradicts `--override-opt_param-scheduler`; leave one of the two out",
        ),
        "--use-checkpoint-opt-param-scheduler": (
            "checkpoint.override_opt_param_scheduler=False",
            "a run that is continued keeps its checkpoint's schedule",
            "it contradicts `--override-opt_param-scheduler`; leave one of the two out",
        ),
        "--no-pipeline-parallel": (
            "parallel.pipeline_model_parallel_size=1",
            "there is one engine, with and without pipeline stages",
            "it contradicts `--pipeline-model-parallel-size`; leave one of the two out (ZeRO stages 2 and 3 "
            "run under pipeline stages too)",
        ),
        "--pipeline-model-parallel-comm-backend=": (
            "nccl",
            "pipeline stages communicate as `--distributed-backend` says",
            "use `--distributed-backend`",
        ),
        "--data-efficiency-curriculum-learning": (
            "data_sampling.curriculum_metrics!=() or curriculum.seqlen_schedule!=none",
            "metrics and lengths alone say what to do",
            "say what makes samples difficult: give `--curriculum-metrics`, or a DeepSpeed JSON whose "
            "`data_efficiency` turns on `curriculum_learning`",
        ),
        "--moe-router-dtype=": (
            "fp32",
            "routers always compute in fp32",
            "routers always compute in fp32; leave it out",
        ),
        "--moe-upcycling-granularity=": (
            "1",
            "with `--moe-use-upcycling` each expert is a copy of the whole MLP",
            "with `--moe-use-upcycling` each expert is a copy of the whole MLP; leave it out",
        ),
        "--moe-dispatch-fwd-dtype=": (
            "bf16",
            "rows are sent to experts in the model's type",
            "rows are sent to experts in the model's type; leave it out",
        ),
        "--moe-combine-bwd-dtype=": (
            "bf16",
            "rows are sent to experts in the model's type",
            "rows are sent to experts in the model's type; leave it out",
        ),
        "--group-query-attention": (
            "model.num_query_groups!=None",
            "`--num-query-groups` has its effect",
            "say how many key/value heads there are with `--num-query-groups`",
        ),
        "--softmax-type=": (
            "vanilla",
            "the softmax has no offset",
            "it would change the numbers, and this version has no such variant; leave it out",
        ),
        "--rope-type=": (
            "rope",
            "rotary embeddings have one form",
            "it would change the numbers, and this version has no such variant; leave it out",
        ),
        "--spec=*": (
            "local",
            "layers have one implementation",
            "layers are built from settings, not from a module that is named; leave it out",
        ),
        "--recompute-modules=*": (
            "core_attn",
            "selective recompute is about the core of attention",
            "other modules are not recomputed alone; use core_attn, or `--recompute-granularity full`",
        ),
        "--rerun-mode=": (
            "disabled validate_results",
            "results are looked at, and `--rerun-on-fault` computes a suspicious step again",
            "statistics of repeated steps are not kept; choose validate_results or disabled",
        ),
        "--exit-signal=": (
            "sigterm",
            "SIGTERM always saves and exits",
            "stop a run with SIGTERM",
        ),
        "--exp-avg-dtype=": (
            "fp32",
            "moments are always fp32",
            "moments are always fp32; leave it out",
        ),
        "--exp-avg-sq-dtype=": (
            "fp32",
            "moments are always fp32",
            "moments are always fp32; leave it out",
        ),
        "--mid-level-dataset-surplus=": (
            "0.005",
            "blends reserve half a percent of each dataset",
            "blends reserve half a percent of each dataset; leave it out",
        ),
    }
)

SILENT: frozenset[str] = frozenset({"--group-query-attention"})
