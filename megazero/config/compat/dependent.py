"""Foreign flags that tune something else, which is off or refused itself: the reason -> the flags.

Leaving such a flag out changes nothing, here as in the program it comes from. Marks are those of
`accepted.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

DEPENDENT: Mapping[str, str] = MappingProxyType(
    {
        "it matters only with `--moe-token-dispatcher-type flex`": """
            --moe-deepep-num-sms= --moe-expert-rank-capacity-factor= --moe-flex-dispatcher-backend=
            --moe-flex-dispatcher-num-sms= --moe-hybridep-num-blocks-permute=
            --moe-hybridep-num-blocks-unpermute= --moe-hybridep-num-sms=
            --moe-hybridep-num-sms-preprocessing= --moe-hybridep-pad-uneven-dispatch-inputs
            --moe-ncclep-zero-copy --moe-paged-stash --moe-paged-stash-buffer-size-factor-cpu=
            --moe-paged-stash-buffer-size-factor-cuda= --moe-paged-stash-page-size=
            --moe-permute-fusion-into-hybridep""",
        "it matters only with `--moe-router-load-balancing-type quantile_balancing`": """
            --moe-router-quantile-balancing-ema=""",
        "it matters only with `--multi-latent-attention`": """
            --kv-lora-rank= --q-lora-rank= --qk-head-dim= --qk-pos-emb-head-dim= --v-head-dim=
            --rotary-scaling-factor= --mscale= --mscale-all-dim= --cache-mla-latents
            --mla-down-proj-fusion --beta-fast= --beta-slow= --original-max-position-embeddings=""",
        "it matters only with `--experimental-attention-variant`": """
            --dsa-indexer-head-dim= --dsa-indexer-k-norm-epsilon= --dsa-indexer-k-norm-fp32
            --dsa-indexer-loss-coeff= --dsa-indexer-n-heads= --dsa-indexer-rope-interleaved
            --dsa-indexer-skip-topk-offset= --dsa-indexer-topk= --dsa-indexer-topk-freq=
            --dsa-indexer-use-sparse-loss --dsa-kernel-backend= --no-dsa-indexer-rotate-activation
            --no-dsa-indexer-scoring-relu --linear-attention-freq= --linear-conv-kernel-dim=
            --linear-key-head-dim= --linear-num-key-heads= --linear-num-value-heads=
            --linear-value-head-dim= --gdp-cutedsl-kernel --gdp-num-chunk-states-to-recompute=
            --gdp-num-householder=""",
        "it matters only with state-space layers, and there are none": """
            --mamba-head-dim= --mamba-num-groups= --mamba-num-heads= --mamba-state-dim=
            --disable-mamba-mem-eff-path --mamba-training-ssm-states-dtype=
            --mamba-inference-conv-states-dtype= --mamba-inference-ssm-states-dtype=""",
        "it matters only with `--mtp-num-layers`": """
            --mtp-loss-scaling-factor= --mtp-detach-heads --mtp-hsm --mtp-use-repeated-layer""",
        "it matters only with FP8 or FP4": """
            --fp8-interval= --no-fp8-wgrad
            --fp8-dot-product-attention --fp8-multi-head-attention --fp8-output-proj
            --fp8-param-gather --fp4-param-gather --fp4-recipe= --activation-func-fp8-input-store
            --tp-only-amax-red
            --keep-fp8-transpose-cache --reuse-grad-buf-for-mxfp8-param-ag --kitchen-attention-backend=
            --moe-router-padding-for-fp8 --moe-router-padding-for-quantization""",
        "it matters only with offload": """
            --cpu-offloading-weights --no-cpu-offloading-activations --cpu-offloading-double-buffering
            --cpu-offloading-retain-pinned-cpu-buffers --activation-offload-fraction= --offload-modules=*
            --min-offloaded-tensor-size= --fine-grained-offloading-max-inflight-offloads=
            --delay-offload-until-cuda-graph --delta-offload-bytes-across-pp-ranks=""",
        "it matters only with `--use-megatron-fsdp`": """
            --data-parallel-sharding-strategy= --outer-dp-sharding-strategy=
            --enable-full-sharding-in-hsdp --fsdp-double-buffer --fsdp-manual-registration
            --fsdp-db-use-persist-buf-on-alloc-fail --megatron-fsdp-version=
            --megatron-fsdp-enable-fine-grained-param-gather --megatron-fsdp-grad-comm-dtype=
            --megatron-fsdp-main-grads-dtype= --megatron-fsdp-main-params-dtype=
            --megatron-fsdp-max-pool-double-buffer --suggested-communication-unit-size=""",
        "it matters only with `--gtp-weight-remat-size`": """
            --gtp-expert-remat-nccl-ub --gtp-remat-nccl-ub
            --gtp-remat-reduce-scatter-with-fp32-accumulation""",
        "it matters only with context parallelism": """
            --cp-comm-type=* --hierarchical-context-parallel-sizes=* --max-seqlen-per-dp-cp-rank=""",
        "it matters only with `--qk-layernorm`": "--apply-wd-to-qk-layernorm --no-weight-decay-cond-type=",
        "it matters only with `--qk-clip`": "--qk-clip-alpha= --qk-clip-threshold=",
        "it matters only with `--use-mup`": """
            --mup-attn-scale-power= --mup-base-head-dim= --mup-base-hidden-size= --mup-embedding-mult=
            --mup-output-mult= --mup-width-mult=""",
        "it matters only with `--enable-mhc-connections`": """
            --mhc-init-gating-factor= --mhc-num-residual-streams= --mhc-recompute-layer-num=
            --mhc-sinkhorn-iterations=""",
        "it matters only with other position embeddings": """
            --rope-scaling-factor= --relative-attention-max-distance= --relative-attention-num-buckets=
            --yarn-beta-fast= --yarn-beta-slow= --yarn-correction-range-round-to-int
            --no-yarn-correction-range-round-to-int --yarn-original-max-position-embeddings=""",
        "it matters only with `--batch-invariant-mode`": "--batch-invariant-backend=",
        "it matters only with `--fim-data`": """
            --fim-eod-token= --fim-fragment-rate= --fim-middle-token= --fim-no-prefix= --fim-pad-token=
            --fim-prefix-token= --fim-rate= --fim-split-sample= --fim-spm-rate= --fim-suffix-token=""",
        "it matters only with `--sft`": "--sft-tokenizer-prompt-format=",
        "it matters only with TikTokenizer": "--tiktoken-pattern= --tiktoken-num-special-tokens=",
        "it matters only with reinforcement learning": """
            --grpo-clamp-eps-lower= --grpo-clamp-eps-upper= --grpo-entropy-term-weight=
            --grpo-filter-groups-with-same-reward --grpo-group-size= --grpo-iterations= --grpo-kl-beta=
            --grpo-prompts-per-step= --rl-consumption-granularity= --rl-default-temperature=
            --rl-default-top-k= --rl-default-top-p= --rl-durable-rollout-bank --rl-generation-lag=
            --rl-importance-sampling-truncation-coef= --rl-inference-expert-model-parallel-size=
            --rl-inference-expert-tensor-model-parallel-size= --rl-inference-logprobs-is-correction=?
            --rl-inference-model-unified-memory-level= --rl-inference-parsers=*
            --rl-inference-pipeline-model-parallel-size= --rl-inference-tensor-model-parallel-size=
            --rl-kv-cache-management-mode= --rl-max-inflight-requests=
            --rl-offload-inference-model-weights-when-idle --rl-offload-optimizer-during-inference
            --rl-partial-rollouts --rl-persist-cuda-graphs=? --rl-profile --rl-profile-dir=
            --rl-prompts-per-eval= --rl-rollout-bank-dir= --rl-rollout-bank-max-bytes=
            --rl-sequence-packing-algo= --rl-sequence-packing-max-sequences-per-bin=
            --rl-skip-bos-token=? --rl-submission-granularity= --rl-training-cuda-graphs=?
            --rl-use-sequence-packing=? --rl-verify-model-weights-swap --refit-method=
            --moe-enable-routing-replay --rl-sequence-packing-bin-size= --langrl-inference-server-type=
            --langrl-inference-server-conversation-template=""",
        "it matters only where text is generated": """
            --inference-dynamic-batching-enable-prefix-caching --inference-cuda-graph-scope=
            --inference-disable-triton-nvls-kernels --inference-fuse-tp-communication
            --inference-grouped-gemm-backend= --inference-moe-disable-fused-quant-kernels
            --inference-moe-token-dispatcher-type= --moe-pad-experts-for-cuda-graph-inference
            --inference-sampling-seed=
            --inference-coordinator-port= --inference-cuda-graph-all-prefills
            --inference-cuda-graph-max-tokens= --inference-disable-ep-consensus
            --inference-dynamic-batching-async-sched-mode= --inference-dynamic-batching-block-size=
            --inference-dynamic-batching-buffer-size-gb=
            --inference-dynamic-batching-cuda-graph-mixed-prefill-count=
            --inference-dynamic-batching-cuda-graph-sizing-distribution=
            --inference-dynamic-batching-logprobs-mode= --inference-dynamic-batching-mamba-memory-ratio=
            --inference-dynamic-batching-max-requests= --inference-dynamic-batching-max-tokens=
            --inference-dynamic-batching-num-cuda-graphs=
            --inference-dynamic-batching-paused-buffer-size-gb=
            --inference-dynamic-batching-prefix-caching
            --inference-dynamic-batching-prefix-caching-coordinator-policy=
            --inference-dynamic-batching-prefix-caching-eviction-policy=
            --inference-dynamic-batching-prefix-caching-mamba-gb=
            --inference-dynamic-batching-prefix-caching-routing-alpha=
            --inference-dynamic-batching-sampling-backend=
            --inference-dynamic-batching-track-generated-token-events
            --inference-dynamic-batching-track-paused-request-events
            --inference-dynamic-batching-unified-memory-level= --inference-logging-step-interval=
            --inference-max-requests= --inference-max-seq-length= --inference-shards=
            --inference-text-gen-server-logging --inference-use-synchronous-zmq-collectives
            --inference-wandb-logging --decode-only-cuda-graphs --no-offset-sampling-seed-by-dp-rank
            --use-same-sampling-seed-across-dp-ranks --use-flashinfer-fused-rope
            --nccl-all-reduce-for-prefill --inference-max-batch-size=
            --inference-dynamic-batching-buffer-overflow-factor=
            --inference-dynamic-batching-buffer-guaranteed-fraction=""",
        "it matters only with `--logits-save-dir` or `--logits-load-dir`": """
            --logits-load-decode-threads= --logits-load-ignore-errors --logits-load-kd-loss-alpha=
            --logits-load-msc-prefetch-depth= --logits-load-prefetch-factor= --logits-save-dtype=
            --logits-save-top-k= --logits-save-top-p= --logits-save-top-p-min-k=""",
        "it matters only with `--inprocess-restart`": """
            --inprocess-active-world-size= --inprocess-barrier-timeout= --inprocess-completion-timeout=
            --inprocess-empty-cuda-cache --inprocess-granularity= --inprocess-hard-timeout=
            --inprocess-heartbeat-interval= --inprocess-heartbeat-timeout= --inprocess-last-call-wait=
            --inprocess-max-iterations= --inprocess-monitor-process-interval=
            --inprocess-monitor-thread-interval= --inprocess-progress-watchdog-interval=
            --inprocess-soft-timeout= --inprocess-termination-grace-time=""",
        "it matters only with `--enable-ft-package`": "--calc-ft-timeouts --ft-num-warmup-iters=",
        "it matters only with `--otel-enabled`": "--otel-service-name= --otel-span-groups=",
        "it matters only with a profiler": """
            --memory-snapshot-path= --pytorch-profiler-collect-callstack
            --pytorch-profiler-collect-chakra --pytorch-profiler-collect-shapes --record-shapes
            --flight-recorder-include-stack-trace --flight-recorder-trace-buffer-size=
            --no-flight-recorder-dump-on-timeout --no-flight-recorder-extra-dump-on-exec
            --no-flight-recorder-include-only-active""",
        "it matters only with `--moe-routing-trace-path`": """
            --moe-routing-trace-capture-hidden-states --moe-routing-trace-capture-logits
            --moe-routing-trace-dump-weights --moe-routing-trace-max-training-iters=""",
        "it matters only with `--engram-layer-ids`": """
            --engram-target-layer-indices=* --engram-hash-table-min-sizes=* --engram-max-ngram-size=
            --engram-embedding-dim-per-ngram= --engram-num-hash-heads-per-ngram= --engram-kernel-size=
            --engram-table-backend= --engram-seed=""",
        "it matters only with `--flextron`": """
            --enable-router --binary-mask --soft-mask --hard-sample-th= --router-beta=
            --original-model-sample-prob= --tau-init= --tau-decay= --loss-alpha= --lr-mult-router=
            --router-gbs= --router-inter-dim= --budget-list=* --budget-probs=* --budget-type=
            --emb-int-list=* --mlp-int-list=* --mamba-int-list=* --moe-expert-int-list=*
            --linear-scaler-start= --linear-scaler-end= --slice --router-std=""",
        "object storage is never used": "--disable-msc",
    }
)
