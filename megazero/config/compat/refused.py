"""Foreign flags that are refused: what to do instead -> the flags."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "use `--deepspeed` and `--deepspeed_config`": "--deepscale --deepscale_config",
        "ranks find each other through the environment; start them with torchrun": "--deepspeed_mpi",
        "use `--micro-batch-size`": "--batch-size",
        "use `--lr-warmup-fraction`": "--warmup",
        "use `--num-layers`": "--encoder-num-layers",
        "use `--seq-length`": "--encoder-seq-length",
        "use `--activation gelu_exact`": "--onnx-safe",
        "use `--finetune`, which loads weights only and starts counting anew": """
            --no-load-lr-state --reset-iteration""",
        "the configuration is not read from checkpoints; give the flags of the first run": """
            --use-checkpoint-args --use-checkpoint-opt_param-scheduler
            --use-checkpoint-opt-param-scheduler""",
        "use `--zero-stage 3`": "--use-torch-fsdp2 --use-megatron-fsdp",
        "offload of the optimizer and the parameters comes in a later version; leave it out": """
            --cpu-optimizer --cpu_torch_adam --optimizer-cpu-offload --cpu-offloading""",
        "tiled linear layers are not offered; cut the layer with `--tensor-model-parallel-size`": """
            --memory-centric-tiled-linear --tile-factor""",
        "use `--pipeline-partition`: the layers of each stage, such as 5,6,6,5, or `parameters`, which "
        "weighs the embedding too": """
            --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers
            --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
            --standalone-embedding-stage --pipeline-model-parallel-layout""",
        "long-context parallelism comes in a later version; leave it out": """
            --ds-sequence-parallel-fpdt --ds-sequence-parallel-fpdt-chunk-size
            --ds-sequence-parallel-fpdt-offloading --force-ds-sequence-parallel""",
        "curriculum learning and token dropping come in a later version; leave it out": """
            --data-efficiency-curriculum-learning --random-ltd --return-data-index""",
        "distillation is not offered; leave it out": """
            --kd --kd-beta-ce --kd-alpha-ce --kd-temp --mos --load-teacher --num-layers-teacher
            --hidden-size-teacher --num-attention-heads-teacher --num-experts-teacher""",
        "switch transformers come with mixture of experts in a later version; leave it out": """
            --num-experts-switch""",
        "fp8 is not offered; use `--bf16`": """
            --fp8-e4m3 --fp8-hybrid --fp8-margin --fp8-interval --fp8-amax-history-len
            --fp8-amax-compute-algo --no-fp8-wgrad --fp8-format""",
        "it would change the numbers, and this version has no such variant; leave it out": """
            --init-method-xavier-uniform --apply-layernorm-1p --fp16-lm-cross-entropy
            --embedding-weights-in-fp32 --head-lr-mult --data-parallel-random-init --qk-layernorm
            --add-qkv-bias --rotary-interleaved --use-rope-scaling --rotary-seq-len-interpolation-factor
            --decoupled-lr --decoupled-min-lr""",
        "index files are found by their content; leave it out": """
            --train-idx-path --train-doc-idx-path --train-sample-idx-path --train-shuffle-idx-path
            --train-desc-path""",
        "give the blend with `--data-path`": "--data-path2 --data-args-path --per-split-data-args-path",
        "checkpoints are numbered by iteration; choose one with `--ckpt-step`": "--load-tag",
        "text is generated with `megazero generate`": """
            --inference --ds-inference --out-seq-length --temperature --top_p --genfile --num-samples
            --sample-input-file --sample-output-file --max-tokens-to-oom
            --inference-batch-times-seqlen-threshold""",
        "profile with a tool from outside, such as nsys or py-spy; leave it out": """
            --profile --profile-backward --profile-ranks --profile_steps --profile-step-start
            --profile-step-end --use-pytorch-profiler""",
        "stop a run with SIGTERM, `--exit-interval` or `--exit-duration-in-mins`; leave it out": """
            --kill-switch-file --adlr-autoresume --adlr-autoresume-interval""",
        "process groups are always made at start; leave it out": "--lazy-mpu-init",
        "datasets are read from local or mounted paths; leave it out": """
            --aml-data-download-path --use-dataset-only""",
        "BERT comes in a later version; `pretrain_gpt.py` has no such setting": """
            --bert-no-binary-head --bert-embedder-type --output-bert-embeddings --mask-prob --mask-factor
            --short-seq-prob --classes-fraction --data-per-class-fraction""",
        "encoder-decoder models are not offered; leave it out": """
            --decoder-num-layers --decoder-seq-length --pipeline-model-parallel-split-rank""",
        "retrieval models are not offered; leave it out": """
            --titles-data-path --query-in-block-prob --evidence-data-path --embedding-path --block-data-path
            --bert-load --ict-load --ict-head-size --biencoder-projection-dim
            --biencoder-shared-query-context-model --indexer-batch-size --indexer-log-interval
            --retriever-report-topk-accuracies --retriever-score-scaling --retriever-seq-length
            --use-one-sent-docs --faiss-use-gpu --qa-data-test --train-with-neg
            --train-hard-neg --retro-add-retriever --retro-cyclic-train-iters
            --retro-encoder-attention-dropout --retro-encoder-hidden-dropout --retro-encoder-layers
            --retro-num-neighbors --retro-num-retrieved-chunks --retro-return-doc-ids --retro-workdir""",
        "vision models are not offered; leave it out": """
            --img-h --img-w --num-channels --num-classes --patch-dim --iter-per-epoch --sample-rate
            --mask-type --vision-backbone-type --vision-pretraining --vision-pretraining-type
            --swin-backbone-type --dino-bottleneck-size --dino-freeze-last-layer --dino-head-hidden-size
            --dino-local-crops-number --dino-local-img-size --dino-norm-last-layer --dino-teacher-temp
            --dino-warmup-teacher-temp --dino-warmup-teacher-temp-epochs""",
        "it belongs to fine-tuning and scoring tasks, which are not offered; the corpus of pretraining is "
        "`--data-path`": """
            --task --train-data --valid-data --epochs --pretrained-checkpoint --eval-micro-batch-size --func
            --processed_file --raw_file --train_file --test_file --task_list --results_path
            --adaptive_seq_len --eval_fp32 --guess-file --answer-file --model_file --data_type
            --knwl_ref_file --resp_ref_file --prompt-file --prompt-type --num-prompt-examples --api-prompt
            --hypothesis --references --strict-lambada --num_fewshot --knwl_gen_file""",
        "it belongs to a tool for corpora, checkpoints or curves; give it to that tool": """
            --input --output-prefix --append-eod --dataset-impl --workers --chunk-size --load-mode
            --hf-ckpt-dir --hf-ckpt-num-shards --to-hf-ckpt --model-type --analyzing-task
            --analyzing-data-type --analyzing-metric --analyzing-num-workers --analyzing-num-threads
            --analyzing-worker-id --analyzing-num-threads-reduce --tb_dir --tb_event_key --plot_name
            --plot_title --plot_y_label --plot_only --csv_name --csv_dir""",
        "it belongs to the launcher; put it before the name of the script": """
            --master_port --master_addr --nproc_per_node --nnodes --node_rank --num_nodes --num_gpus
            --master-port --master-addr --nproc-per-node --node-rank --hostfile --force_multi --include
            --exclude --nodes --exclusive --job-name --output --container-image --container-mounts
            --overcommit --export --query-gpu --format""",
    }
)
