"""Foreign flags of features that do not exist here: the name of the feature -> the reason and the flags.

A flag that only tunes such a feature is not refused itself: it has a row in `dependent.py`, so that a
command line is refused once for each feature and not once for each of its flags. Marks are those of
`accepted.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

ABSENT: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "latent experts": (
            "experts of a narrower space are not built; give them a small `--moe-ffn-hidden-size`",
            "--moe-latent-size=",
        ),
        "forced routing": (
            "the router's choice cannot be forced; leave it out, and balance with "
            "`--moe-router-load-balancing-type` or `--moe-router-enable-expert-bias`",
            "--moe-router-force-load-balancing --moe-router-force-biased=",
        ),
        "dispatchers of other projects": (
            "DeepEP's kernels are not used; leave it out, and `--moe-token-dispatcher-type alltoall` moves "
            "the same rows",
            "--moe-enable-deepep",
        ),
        "recompute of other modules": (
            "other modules are not recomputed alone; use `--recompute-granularity full`",
            "--moe-layer-recompute",
        ),
        "multi-latent attention": (
            "multi-latent attention is not built; use `--num-query-groups` for smaller keys and values",
            "--multi-latent-attention --no-multi-latent-attention",
        ),
        "linear and sparse attention": (
            "linear, sparse and gated attention are not built; leave it out, and each layer has "
            "softmax attention",
            """
            --experimental-attention-variant= --attention-output-gate --window-size=
            --window-attn-skip-freq=""",
        ),
        "state-space models": (
            "state-space and hybrid models are not built; leave it out, and each layer is a "
            "transformer layer",
            """
            --is-hybrid-model --hybrid-layer-pattern= --hybrid-override-pattern=
            --hybrid-attention-ratio= --hybrid-mlp-ratio=""",
        ),
        "heterogeneous layers": (
            "layers that differ from each other are not built; give one `--num-layers`, "
            "`--hidden-size` and `--ffn-hidden-size`",
            """
            --heterogeneous-layers-config-path= --heterogeneous-layers-config-encoded-json=
            --heterogeneous-block-specs --hetereogenous-dist-checkpoint""",
        ),
        "multi-token prediction": (
            "the prediction of several tokens at once is not built; leave it out",
            "--mtp-num-layers= --mtp-hybrid-override-pattern= --mtp-standalone",
        ),
        "model variants": (
            "it would change the numbers, and this version has no such variant; leave it out",
            """
            --init-method-xavier-uniform --apply-layernorm-1p --fp16-lm-cross-entropy
            --embedding-weights-in-fp32=* --head-lr-mult= --data-parallel-random-init --qk-layernorm
            --qk-l2-norm --qk-clip --rotary-interleaved --use-rope-scaling
            --rotary-seq-len-interpolation-factor= --decoupled-lr= --decoupled-min-lr=
            --activation-func-clamp-value= --glu-linear-offset= --quick-geglu --gated-linear-unit
            --use-te-activation-func --embedding-init-method-std= --softmax-scale= --no-rope-freq=
            --moe-apply-probs-on-input --mrope-section=* --use-mup --enable-mhc-connections
            --output-logit-dtype=
            --disable-bf16-reduced-precision-matmul --no-attention-softmax-in-fp32 --freeze-all-layers
            --enable-autocast --autocast-dtype= --batch-invariant-mode
            --ddp-reduce-scatter-with-fp32-accumulation
            --ddp-param-name-patterns-for-fp32-local-accumulation=*
            --enable-gpt-oss --engram-layer-ids=*""",
        ),
        "FP8 and FP4": (
            "fp4, weights kept in fp8 and recipes of other projects are not offered; use `--bf16`, with "
            "`--fp8-format` for products of 8-bit floats",
            """
            --fp8-param --fp8-quantizer-factory= --fp4-format=
            --fp4-quantizer-factory= --fp4-param=* --quant-recipe= --te-precision-config-file=
            --kitchen-config-file= --kitchen-recipe-number= --use-kitchen --use-kitchen-attention""",
        ),
        "offload": (
            "activations are not offloaded layer by layer; leave it out (`--checkpoint-in-cpu` keeps what "
            "recompute starts from in host memory)",
            """
            --cpu-offloading --cpu-offloading-num-layers= --fine-grained-activation-offloading""",
        ),
        "tiled layers": (
            "layers are not computed in tiles; cut them with `--tensor-model-parallel-size`",
            """
            --memory-centric-tiled-linear=* --tile-factor=* --mlp-chunks-for-training=
            --mlp-chunks-for-prefill= --tensor-parallel-num-weight-shards=
            --expert-tensor-parallel-num-weight-shards= --gtp-weight-remat-size=
            --expert-gtp-weight-remat-size= --gtp-remat-opt-in-modules=*""",
        ),
        "long contexts": (
            "long-context parallelism comes in a later version; leave it out",
            """
            --ds-sequence-parallel-fpdt --ds-sequence-parallel-fpdt-chunk-size=
            --ds-sequence-parallel-fpdt-offloading --force-ds-sequence-parallel=*
            --hybrid-context-parallel --variable-seq-lengths""",
        ),
        "a weight of distillation that nothing reads": (
            "Megatron-DeepSpeed reads it and does not use it; leave it out",
            "--kd-alpha-ce=*",
        ),
        "distillation by ModelOpt": (
            "ModelOpt is not used; `--kd` with `--load-teacher` distils from a checkpoint",
            """
            --export-kd-teacher-load=* --export-model-type=* --export-te-mcore-model=*
            --export-force-local-attention=* --logits-save-dir= --logits-load-dir= --modelopt-enabled
            --export-kd-cfg= --export-default-te-spec""",
        ),
        "BERT embeddings for retrieval": (
            "embeddings of whole texts are not offered; leave it out",
            "--bert-embedder-type= --output-bert-embeddings --mask-factor=",
        ),
        "encoder-decoder models": (
            "encoder-decoder models are not offered; leave it out",
            "--decoder-num-layers= --decoder-seq-length= --pipeline-model-parallel-split-rank=*",
        ),
        "retrieval": (
            "retrieval models are not offered; leave it out",
            """
            --titles-data-path= --query-in-block-prob= --evidence-data-path= --embedding-path=
            --block-data-path= --bert-load= --ict-load= --ict-head-size= --biencoder-projection-dim=
            --biencoder-shared-query-context-model --indexer-batch-size= --indexer-log-interval=
            --retriever-report-topk-accuracies=* --retriever-score-scaling --retriever-seq-length=
            --use-one-sent-docs --faiss-use-gpu=* --qa-data-test=* --train-with-neg=*
            --train-hard-neg=* --retro-add-retriever=* --retro-cyclic-train-iters=*
            --retro-encoder-attention-dropout=* --retro-encoder-hidden-dropout=* --retro-encoder-layers=*
            --retro-num-neighbors=* --retro-num-retrieved-chunks=* --retro-return-doc-ids=*
            --retro-workdir=* --report-topk-accuracies=* --retro-project-dir=""",
        ),
        "vision": (
            "vision models are not offered; leave it out",
            """
            --img-h= --img-w= --num-channels= --patch-dim= --iter-per-epoch=
            --sample-rate= --classes-fraction= --data-per-class-fraction= --mask-type=
            --vision-backbone-type= --vision-pretraining --vision-pretraining-type= --swin-backbone-type=
            --dino-bottleneck-size= --dino-freeze-last-layer= --dino-head-hidden-size=
            --dino-local-crops-number= --dino-local-img-size= --dino-norm-last-layer --dino-teacher-temp=
            --dino-warmup-teacher-temp= --dino-warmup-teacher-temp-epochs= --disable-vision-class-token=*
            --language-model-type=* --vision-model-type=* --use-te=*
            --allow-missing-vision-projection-checkpoint=* --pixel-shuffle=* --use-tiling=*
            --use-tile-tags=* --use-thumbnail=* --max-num-tiles=* --num-frames=* --total-seq-length=*
            --model-provider=* --dataset-provider=* --language-model-checkpoint=* --img-embedding-idx=
            --valid-path=* --freeze-LM --freeze-ViT""",
        ),
        "reinforcement learning": (
            "reinforcement learning is not offered; leave it out",
            "--perform-rl-step --langrl-env-config=",
        ),
        "fine-tuning on conversations": (
            "fine-tuning on conversations is not offered; `--finetune` trains on text from given weights",
            "--sft --finetune-hf-dataset=* --chat-template= --tokenizer-prompt-format=*",
        ),
        "tasks": (
            "it belongs to scoring tasks, which are not offered; finetune.py trains on labelled samples and "
            "evaluates on them with `--task`",
            """
            --func=* --processed_file=* --raw_file=* --train_file=* --test_file=* --task_list=*
            --results_path=* --adaptive_seq_len=* --eval_fp32=* --guess-file=* --answer-file=* --model_file=*
            --data_type=* --knwl_ref_file=* --resp_ref_file=* --prompt-type=* --num-prompt-examples=*
            --api-prompt=* --hypothesis=* --references=* --strict-lambada=* --num_fewshot=*
            --knwl_gen_file=*""",
        ),
        "text generation": (
            "text is generated with `megazero generate`",
            """
            --inference= --ds-inference --out-seq-length=* --temperature=* --top_p=* --top_k=*
            --genfile=* --num-samples=* --sample-input-file=* --sample-output-file=* --max-tokens-to-oom=
            --prompts=* --prompt-file=* --prompt-file-num-truncate=* --prompt-path=*
            --num-tokens-to-generate=* --output-path=* --output-every-n-results=* --termination-id=*
            --incoming-requests-per-sec=* --incoming-requests-per-step=* --inference-repeat-n=*
            --inference-ckpt-non-strict=* --use-coordinator=* --no-record-throughput=*
            --input-image-path=* --gt-path=* --partition-id=* --num-partitions=*
            --inference-batch-times-seqlen-threshold= --inference-dynamic-batching --return-log-probs
            --skip-prompt-log-probs --use-legacy-static-engine --use-inference-optimized-layers
            --flash-decode --enable-chunked-prefill --num-speculative-tokens= --num-tokens-to-prompt=*
            --incoming-requests-duration=""",
        ),
        "profiling": (
            "profile with a tool from outside, such as nsys or py-spy; leave it out",
            """
            --profile --profile-backward=* --profile-ranks=* --profile_steps=* --profile-step-start=
            --profile-step-end= --use-pytorch-profiler --nvtx-ranges --record-memory-history
            --flight-recorder-dump-path= --run-workload-inspector-server --otel-enabled""",
        ),
        "fault tolerance": (
            "a run is not restarted from within, and no errors are put into it; start it again, and "
            "`--load` continues it",
            """
            --enable-ft-package --inprocess-restart --gpu-sniff-test-interval= --error-injection-rate=
            --error-injection-type= --result-rejected-tracker-filename= --replication
            --replication-factor= --replication-jump= --distributed-timeout-seconds-after-init=""",
        ),
        "dumps": (
            "tensors of single steps are not written; leave it out",
            """
            --save-activations-interval= --save-dgrads-interval= --save-params-interval=
            --save-tokens-per-expert-interval= --save-wgrads-interval= --moe-routing-trace-path=
            --dump-param-to-param-group-map=""",
        ),
        "temporary checkpoints": (
            "all checkpoints are of one kind; keep few of them with `--save-interval` and `--keep-last`",
            """
            --non-persistent-ckpt-type= --non-persistent-global-ckpt-dir=
            --non-persistent-local-ckpt-algo= --non-persistent-local-ckpt-dir=
            --non-persistent-save-interval= --persistent-save-interval=""",
        ),
        "settings from checkpoints": (
            "the configuration is not read from checkpoints; give the flags of the first run",
            "--use-checkpoint-args --use-mp-args-from-checkpoint-args --load-main-params-from-ckpt",
        ),
        "separate validation": (
            "there is one validation set, evaluated with the batch of training for `--eval-iters`"
            " batches; leave it out",
            """
            --multiple-validation-sets --full-validation --validation-set-names=*
            --eval-micro-batch-size= --eval-global-batch-size= --start-eval-at-iter=""",
        ),
        "data variants": (
            "samples are cut from documents in one way; leave it out",
            """
            --fim-data --phase-transition-iterations=
            --decrease-batch-size-if-needed""",
        ),
        "batch-size schedules": (
            "the batch grows in equal steps: use `--rampup-batch-size`",
            "--step-batch-size-schedule=",
        ),
        "elastic models": (
            "models with choosable widths are not offered; leave it out",
            "--flextron",
        ),
        "tests of another trainer": (
            "it belongs to the tests of another trainer; leave it out",
            "--test-mode",
        ),
        "object storage": (
            "datasets and checkpoints are read from local or mounted paths; leave it out",
            "--aml-data-download-path=* --use-dataset-only=* --object-storage-cache-path= --enable-msc",
        ),
    }
)

ABSENT_VALUES: Mapping[str, str] = MappingProxyType(
    {
        "--moe-router-dtype": "model variants",
        "--moe-dispatch-fwd-dtype": "FP8 and FP4",
        "--moe-combine-bwd-dtype": "FP8 and FP4",
        "--spec": "layers from code",
        "--softmax-type": "model variants",
        "--rope-type": "model variants",
        "--recompute-modules": "recompute of other modules",
        "--rerun-mode": "fault tolerance",
        "--transformer-impl": "text generation",
        "--exp-avg-dtype": "optimizer state in fewer bits",
        "--exp-avg-sq-dtype": "optimizer state in fewer bits",
    }
)
"""Flags accepted with some values: the feature that their other values ask for."""
