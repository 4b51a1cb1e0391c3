"""Foreign flags that are refused because it is said in another way here: what to do instead -> the flags.

Marks are those of `accepted.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "use `--deepspeed` and `--deepspeed_config`": "--deepscale=* --deepscale_config=*",
        "ranks find each other through the environment; start them with torchrun": "--deepspeed_mpi=*",
        "use `--micro-batch-size`": "--batch-size=",
        "use `--lr-warmup-fraction`": "--warmup=",
        "use `--moe-expert-capacity-factor`": "--moe-token-dropping",
        "use `--moe-router-num-groups` and `--moe-router-group-topk`, which depend on no layout": """
            --moe-router-topk-limited-devices=""",
        "use `--num-experts` with `--moe-router-topk 1 --moe-router-pre-softmax`": "--num-experts-switch=*",
        "use `--num-layers`": "--encoder-num-layers=",
        "use `--seq-length`": "--encoder-seq-length=",
        "use `--activation gelu_exact`": "--onnx-safe=?",
        "name the nonlinearity with `--activation`": "--activation-func=",
        "use `--lr-decay-iters`, `--lr-warmup-iters`, `--lr-wsd-decay-iters` or their like in "
        "samples": "--lr-decay-steps= --lr-warmup-steps= --wsd-decay-steps=",
        "weight decay moves over the whole training; leave it out": "--wd-incr-steps=",
        "use `--finetune`, which loads weights only and starts counting anew": """
            --no-load-lr-state --reset-iteration""",
        "use `--zero-stage 3`": "--use-megatron-fsdp --use-custom-fsdp",
        "use `--num-virtual-stages-per-pipeline-rank`": "--virtual-pipeline-model-parallel-size=",
        "use `--pipeline-partition`: the layers of each stage, such as 5,6,6,5, or `parameters`, "
        "which weighs the embedding too": """
            --decoder-first-pipeline-num-layers= --decoder-last-pipeline-num-layers=
            --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
            --standalone-embedding-stage=* --pipeline-model-parallel-layout=
            --num-layers-in-first-pipeline-stage= --num-layers-in-last-pipeline-stage=""",
        "use `--recompute-granularity full` with `--recompute-method block`, which recomputes "
        "only some layers": "--num-microbatches-with-partial-activation-checkpoints=",
        "the order of samples follows from data, split, seed, length and "
        "`--train-data-exact-num-epochs`, and its files are found by their content; leave it out, and "
        "analyze difficulties with the same settings": """
            --train-idx-path= --train-doc-idx-path= --train-sample-idx-path= --train-shuffle-idx-path=
            --train-desc-path=*""",
        "give the blend with `--data-path`": "--data-path2=* --data-args-path= --per-split-data-args-path=",
        "each checkpoint holds the position in the data; leave it out": "--dataloader-save=*",
        "use `--reset-attention-mask`": "--dataloader-inter-document-masking",
        "checkpoints are numbered by iteration; choose one with `--ckpt-step`": """
            --load-tag=* --override-ckpt-iteration=""",
        "a checkpoint loads on any layout without conversion; see `megazero checkpoint --help` "
        "for other formats": """
            --ckpt-convert-format= --ckpt-convert-save= --ckpt-convert-update-legacy-dist-opt-format""",
        "stop a run with SIGTERM, `--exit-interval` or `--exit-duration-in-mins`; leave it out": """
            --kill-switch-file=* --adlr-autoresume --adlr-autoresume-interval=""",
        "process groups are always made at start; leave it out": "--lazy-mpu-init",
        "`megazero plan` says what any rank of any layout would do": "--fake-process-group",
        "set NCCL's environment variables; leave it out": "--nccl-communicator-config-path=",
        "settings in a file are given with `--config`": """
            --yaml-cfg= --checkpoint= --ddp= --dist= --logger= --model= --profiling=
            --rerun-state-machine= --rng= --scheduler= --straggler= --tokenizer= --train= --validation=""",
        "`--check-config` prints the settings": "--save-config-filepath= --config-logger-dir=",
        "it takes a Python object, which a command line cannot give; leave it out": """
            --init-method= --output-layer-init-method= --embedding-init-method=
            --finalize-model-grads-func= --grad-scale-func= --grad-sync-func= --no-sync-func=
            --param-sync-func= --moe-grad-scale-func= --mtp-grad-scale-func= --timers=
            ---cpu-offloading-context= --experimental-attention-variant-loss-scale-func=
            --pipeline-dtype=""",
        "the vocabulary is padded to a multiple of `--make-vocab-size-divisible-by` times the "
        "tensor-parallel size; with 1 it is not padded for one tensor-parallel rank": """
            --padded-vocab-size= --no-pad-vocab-size""",
        "a tokenizer's special tokens come from its own files; add sentinels with `--vocab-extra-ids`": """
            --tokenizer-special-tokens=* --tokenizer-metadata= --null-tokenizer-eod-id=
            --null-tokenizer-pad-id=""",
        "it belongs to a tool for corpora, checkpoints or curves; give it to that tool": """
            --input=* --output-prefix=* --append-eod=* --dataset-impl=* --workers=* --chunk-size=*
            --load-mode=* --hf-ckpt-dir=* --hf-ckpt-num-shards=* --to-hf-ckpt=* --model-type=*
            --analyzing-task=* --analyzing-data-type=* --analyzing-metric=* --analyzing-num-workers=*
            --analyzing-num-threads=* --analyzing-worker-id=* --analyzing-num-threads-reduce=* --tb_dir=*
            --tb_event_key=* --plot_name=* --plot_title=* --plot_y_label=* --plot_only=* --csv_name=*
            --csv_dir=*""",
        "it belongs to the launcher; put it before the name of the script": """
            --master_port=* --master_addr=* --nproc_per_node=* --nnodes=* --node_rank=* --num_nodes=*
            --num_gpus=* --master-port=* --master-addr=* --nproc-per-node=* --node-rank=* --hostfile=*
            --force_multi=* --include=* --exclude=* --nodes=* --exclusive=* --job-name=* --output=*
            --container-image=* --container-mounts=* --container-workdir=* --ntasks-per-node=* --mpi=*
            --overcommit=* --export=* --query-gpu=* --format=*""",
    }
)
