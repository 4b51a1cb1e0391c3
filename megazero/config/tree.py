"""The configuration: one frozen, typed tree that every other part of megazero reads.

A field states its type, default and meaning once. `flags.py` turns the metadata into command line
flags, `document.py` reads and writes YAML, `reference.py` writes the documentation, and `rules/` checks
what spans fields. Names are Megatron's wherever Megatron has one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, NonNegativeInt, PositiveFloat, PositiveInt

from megazero.config.acceleration import AccelerationConfig
from megazero.config.curriculum import CurriculumConfig
from megazero.config.data_sampling import DataSamplingConfig
from megazero.config.distillation import DistillationConfig
from megazero.config.experts import ModelConfig as ModelConfig
from megazero.config.finetuning import FinetuneConfig
from megazero.config.guards import GuardsConfig
from megazero.config.offload import OffloadConfig
from megazero.config.optimization import OptimizerConfig as OptimizerConfig
from megazero.config.option import Duration, Interval, Patience, Scale, option
from megazero.config.option import Section as Section
from megazero.config.skipping import SkippingConfig
from megazero.config.sources import DataConfig as DataConfig
from megazero.config.sources import TokenizerConfig as TokenizerConfig
from megazero.config.tree_output import CheckpointConfig, LoggingConfig


class ParallelConfig(Section):
    """Parallelism"""

    tensor_model_parallel_size: PositiveInt = option(
        1, "ranks that share each layer's weights", aliases=("--model-parallel-size",)
    )
    pipeline_model_parallel_size: PositiveInt = option(1, "pipeline stages")
    num_layers_per_virtual_pipeline_stage: PositiveInt | None = option(
        None, "layers per model chunk; each stage holds several chunks (interleaved schedule)"
    )
    num_virtual_stages_per_pipeline_rank: PositiveInt | None = option(
        None, "the same, given as the number of chunks per stage"
    )
    pipeline_schedule: Literal["auto", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] = option(
        "auto",
        "order of forward and backward passes; auto is 1f1b, or interleaved with virtual stages",
        switches={"--enable-zbh1-pipeline": "zb-h1"},
    )
    pipeline_partition: str = option(
        "uniform",
        "how layers are split over the stages: uniform, parameters, cost, measured, type:REGEX, or the "
        "number of layers of each, such as 5,6,6,5",
    )
    context_parallel_size: PositiveInt = option(
        1, "ranks that share each sequence", aliases=("--ds-sequence-parallel-size",)
    )
    expert_model_parallel_size: PositiveInt = option(
        1, "ranks that share the experts of a layer", aliases=("--moe-expert-parallel-size",)
    )
    expert_tensor_parallel_size: PositiveInt | None = option(
        None,
        "ranks that share each expert's weights; for the experts a stage's ranks are expert-tensor x "
        "expert-model x replicas, for all else tensor x context x data; default: the tensor-parallel size",
        switches={"--enable-expert-tensor-parallelism": None},
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = option(
        "alltoall",
        "how tokens get to the ranks that hold their experts: alltoall sends each row where it is needed; "
        "allgather sends all rows to all of them and adds up what comes back",
        synonyms={"alltoall_seq": "alltoall"},
        refused={
            "flex": "calls kernels of other projects, which are not used here; alltoall moves the same rows"
        },
    )
    sequence_parallel: bool = option(
        False, "shard norm and dropout regions over the tensor-parallel ranks along the sequence"
    )
    distributed_backend: Literal["auto", "nccl", "gloo"] = option(
        "auto",
        "communication library; auto is nccl on CUDA, else gloo, with shared memory within a host",
    )
    check_collectives: bool = option(
        False, "verify before each collective that all its members make the same call; slow"
    )
    distributed_timeout_minutes: Patience = option(10.0, "longest wait in one collective", unit="minutes")
    heartbeat_timeout_minutes: Patience | None = option(
        1.0,
        "longest time without a sign of life from a rank, once all have made a step; null turns this off",
        unit="minutes",
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where to train; auto is CUDA where present")


class ZeroConfig(Section):
    """ZeRO data parallelism"""

    stage: Literal[0, 1, 2, 3] = option(
        0,
        "what is sharded over the data-parallel ranks: 0 nothing, 1 the optimizer state, 2 also the "
        "gradients, 3 also the parameters",
        flag="--zero-stage",
        switches={"--use-distributed-optimizer": 1, "--use-torch-fsdp2": 3},
    )
    bucket_size: PositiveInt = option(
        16_000_000,
        "parameters per bucket; a bucket is reduced or gathered by one call",
        aliases=("--zero-reduce-bucket-size", "--ddp-bucket-size"),
        unit="elements",
    )
    overlap_grad_reduce: bool = option(
        True,
        "reduce gradients after backward instead of while it runs",
        flag="--no-overlap-grad-reduce",
        switches={"--overlap-grad-reduce": True},
    )
    overlap_param_gather: bool = option(
        True,
        "gather the parameters of stage 3 when they are used instead of ahead",
        flag="--no-overlap-param-gather",
        switches={"--overlap-param-gather": True},
    )
    prefetch_size: NonNegativeInt = option(
        50_000_000,
        "stage 3: parameters gathered ahead of their use",
        flag="--zero-prefetch-bucket-size",
        unit="elements",
    )
    param_persistence_threshold: NonNegativeInt = option(
        100_000,
        "stage 3: parameters below this size stay whole on every rank",
        flag="--zero-param-persistence-threshold",
        unit="elements",
    )
    max_live_parameters: NonNegativeInt = option(
        1_000_000_000,
        "stage 3: keep gathered parameters for their next use in the step, up to this many; "
        "0 frees each after its use",
        flag="--zero-max-live-parameters",
        unit="elements",
    )
    hpz_partition_size: PositiveInt = option(
        1,
        "stage 3: ranks of one node that hold a second partition of the parameters, so that backward "
        "gathers within the node (ZeRO++); 1 is off",
        flag="--zero-hpz-partition-size",
    )
    quantized_weights: Literal["none", "int8", "int4", "fp8"] = option(
        "none",
        "codes in which weights of two or more dims are gathered (qwZ of ZeRO++); masters stay exact",
        flag="--zero-quantized-weights",
    )
    quantized_gradients: Literal["none", "int8", "int4", "fp8"] = option(
        "none",
        "codes in which gradients of such weights are sent, to be summed in fp32 (qgZ of ZeRO++)",
        flag="--zero-quantized-gradients",
    )
    quantization_block_size: PositiveInt = option(
        256,
        "consecutive elements that share a scale where weights or gradients travel as codes",
        flag="--zero-quantization-block-size",
        unit="elements",
    )
    quantization_rounding: Literal["nearest", "stochastic"] = option(
        "nearest",
        "how gradients are rounded to codes; stochastic has no bias, and twice the bound on the error",
        flag="--zero-quantization-rounding",
    )
    node_size: PositiveInt = option(
        1,
        "data-parallel ranks of one node: quantized gradients are first summed within it; 1 sums them in one "
        "exchange, unless `--zero-hpz-partition-size` says how many there are",
        flag="--zero-node-size",
    )
    grad_reduce_dtype: Literal["fp32", "bf16", "fp16"] = option(
        "fp32",
        "type of gradients on the wire between data-parallel ranks",
        switches={"--grad-reduce-in-bf16": "bf16"},
    )
    grad_accumulation_dtype: Literal["fp32", "bf16", "fp16"] = option(
        "fp32",
        "type of gradient sums over the micro-batches",
        aliases=("--main-grads-dtype",),
        switches={"--accumulate-allreduce-grads-in-fp32": "fp32"},
    )
    main_params_dtype: Literal["fp32", "bf16", "fp16"] = option(
        "fp32", "type of the optimizer's own copy of the weights"
    )


class BatchConfig(Section):
    """Batch sizes"""

    micro_batch_size: PositiveInt = option(..., "sequences per forward pass on one replica")
    global_batch_size: PositiveInt | None = option(
        None, "sequences per optimizer step; default: micro batch x data-parallel size"
    )
    rampup_batch_size: tuple[PositiveInt, PositiveInt, PositiveInt] | None = option(
        None, "START INCREMENT SAMPLES: grow the global batch from START by INCREMENT over SAMPLES"
    )


class PrecisionConfig(Section):
    """Precision"""

    dtype: Literal["fp32", "fp16", "bf16"] = option(
        "fp32",
        "type of parameters and activations; moments are always fp32, and so are master weights and "
        "gradient sums unless the section `zero` says otherwise",
        flag="--params-dtype",
        switches={"--fp16": "fp16", "--bf16": "bf16"},
    )
    loss_scale: Scale = option(
        None, "static loss scale of fp16 and bf16; default, and with 0: dynamic for fp16, none for bf16"
    )
    initial_loss_scale: PositiveFloat = option(2.0**32, "first dynamic loss scale")
    min_loss_scale: PositiveFloat = option(1.0, "floor of the dynamic loss scale")
    loss_scale_window: PositiveInt = option(1000, "good steps before the scale doubles", unit="iterations")
    hysteresis: PositiveInt = option(2, "overflows tolerated before the scale halves")
    fp8_format: Literal["none", "e4m3", "hybrid"] = option(
        "none",
        "multiply 8-bit floats in the linear layers: e4m3 in all products; hybrid has gradients in e5m2, "
        "which has more range and fewer digits",
        switches={"--fp8": "hybrid", "--fp8-hybrid": "hybrid", "--fp8-e4m3": "e4m3"},
    )
    fp8_recipe: Literal["delayed", "tensorwise"] = option(
        "delayed",
        "where the scales of 8-bit tensors come from: the amaxes of earlier steps, or the tensor itself",
        refused={
            "mxfp8": "needs scales of blocks of 32 elements, which are not built; choose tensorwise",
            "blockwise": "needs scales of blocks, which are not built; choose tensorwise",
            "custom": "takes code of another project; choose tensorwise or delayed",
        },
    )
    fp8_margin: NonNegativeInt = option(
        0, "powers of two that the scales of 8-bit tensors stay below the largest ones"
    )
    fp8_amax_history_len: PositiveInt = option(1, "delayed: steps whose amaxes are kept", unit="iterations")
    fp8_amax_compute_algo: Literal["most_recent", "max"] = option(
        "most_recent", "delayed: which of the kept amaxes makes the scale"
    )
    first_last_layers_bf16: bool = option(
        False, "8-bit products: leave the first and the last layers of the model out"
    )
    num_layers_at_start_in_bf16: NonNegativeInt = option(
        1, "how many first layers `--first-last-layers-bf16` leaves out"
    )
    num_layers_at_end_in_bf16: NonNegativeInt = option(
        1, "how many last layers `--first-last-layers-bf16` leaves out"
    )

    def layers_in_16_bits(self, layers: int) -> frozenset[int]:
        """The layers, of `layers` in a model, whose products are in 16 bits; all of them without fp8."""
        if self.fp8_format == "none":
            return frozenset(range(layers))
        if not self.first_last_layers_bf16:
            return frozenset()
        first, last = self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16
        return frozenset(i for i in range(layers) if i < first or i >= layers - last)


class RecomputeConfig(Section):
    """Activation recompute"""

    granularity: Literal["none", "selective", "full"] = option(
        "none",
        "what backward computes again: nothing, the attention core, or whole layers",
        flag="--recompute-granularity",
        switches={
            "--recompute-activations": "selective",
            "--checkpoint-activations": "full",
            "--deepspeed-activation-checkpointing": "full",
        },
    )
    method: Literal["uniform", "block", "every"] = option(
        "uniform",
        "uniform: every unit of layers; block: only the first layers of each model chunk; "
        "every: one layer of each unit",
        flag="--recompute-method",
        aliases=("--activations-checkpoint-method",),
        # Megatron 2 recomputed whole layers wherever it was told how.
        implies={"--activations-checkpoint-method": ("granularity", "full")},
    )
    num_layers: PositiveInt = option(
        1,
        "uniform, every: layers per unit; block: layers recomputed per model chunk",
        flag="--recompute-num-layers",
        aliases=("--checkpoint-num-layers", "--activations-checkpoint-num-layers"),
    )
    partition_activations: bool = option(
        False,
        "split what a recomputed unit starts from over the tensor-parallel ranks: each keeps only its part",
        aliases=("--distribute-saved-activations", "--distribute-checkpointed-activations"),
    )
    offload: bool = option(
        False, "keep what a recomputed unit starts from in host memory", flag="--checkpoint-in-cpu"
    )
    logits: bool = option(
        False,
        "compute the projection to the vocabulary and the loss by blocks of the vocabulary, and again in "
        "backward, so that the logits are never whole",
        flag="--recompute-logits",
    )


def _none_below_zero(batches: Any) -> Any:
    return 0 if isinstance(batches, int) and batches < 0 else batches


Batches = Annotated[NonNegativeInt, BeforeValidator(_none_below_zero)]
"""How many batches; both Megatrons evaluate where there is at least one, so -1 is none."""


class TrainingConfig(Section):
    """Training length and evaluation"""

    train_iters: PositiveInt | None = option(None, "length of the training", unit="iterations")
    train_samples: PositiveInt | None = option(None, "length of the training", unit="samples")
    train_tokens: PositiveInt | None = option(None, "length of the training", unit="tokens")
    seed: NonNegativeInt = option(1234, "seed of initial weights, data order and dropout")
    eval_interval: Interval = option(
        1000, "iterations between evaluations; 0: only one, at the end", unit="iterations"
    )
    eval_iters: Batches = option(100, "global batches per evaluation; 0 or less turns it off")
    eval_from_start: bool = option(
        False,
        "let every evaluation read the same validation samples, the first ones, so that losses of different "
        "steps and runs compare; default: each reads the next ones",
    )
    exit_interval: Interval = option(
        None, "save and exit at multiples of this; default, and with 0: never", unit="iterations"
    )
    exit_duration_in_mins: Duration = option(
        None, "save and exit after so long; default, and with 0: never", unit="minutes"
    )
    skip_train: bool = option(False, "evaluate and test only")
    deterministic_mode: bool = option(False, "use only kernels that give the same bits each time")


class Config(Section):
    """Everything that determines a run."""

    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    zero: ZeroConfig = ZeroConfig()
    offload: OffloadConfig = OffloadConfig()
    batch: BatchConfig
    optimizer: OptimizerConfig
    precision: PrecisionConfig = PrecisionConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    acceleration: AccelerationConfig = AccelerationConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    guards: GuardsConfig = GuardsConfig()
    finetune: FinetuneConfig = FinetuneConfig()
    distillation: DistillationConfig = DistillationConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    data_sampling: DataSamplingConfig = DataSamplingConfig()
    skipping: SkippingConfig = SkippingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
