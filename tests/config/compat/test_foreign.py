"""Each flag of Megatron-LM and Megatron-DeepSpeed is a setting, has no effect here, or is refused by name."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megazero.config.compat.foreign import FOREIGN_FLAGS
from megazero.config.flags import scan
from megazero.config.resolve import parse_config
from megazero.errors import ConfigError
from tests.config.samples import BASE_FLAGS
from tests.tables import over_table

MEGATRON_FLAGS = Path(__file__).with_name("megatron_flags.txt").read_text(encoding="utf-8").split()


def test_the_list_is_whole() -> None:
    assert len(set(MEGATRON_FLAGS)) == 407


@over_table("name", MEGATRON_FLAGS)
def test_no_megatron_flag_is_merely_unknown(name: str) -> None:
    assert not any("unknown flag" in problem for problem in scan([name, "1"]).problems)


@over_table("name", sorted(FOREIGN_FLAGS))
def test_each_foreign_flag_says_why(name: str) -> None:
    row = FOREIGN_FLAGS[name]
    assert row.accepted or row.refused
    for reason in (row.accepted, row.refused):
        assert reason is None or (len(reason) > 10 and not reason.endswith("."))


@over_table(
    "argv",
    [
        "--no-pipeline-parallel",
        "--DDP-impl torch",
        "--data-impl mmap",
        "--enable-zbh1-exact-semantics",
        "--zero-allgather-bucket-size 500000000",
        "--zero-contigious-gradients",
        "--create-moe-param-group",
        "--use-tutel",
        "--moe-router-dtype fp32",
        "--local_rank 3",
        "--local_rank=3",
        "--use-flash-attn-v2",
    ],
)
def test_accepted_without_effect(argv: str) -> None:
    result = scan([*argv.split(), "--num-layers", "7"])
    assert result.problems == []
    assert len(result.ignored) == 1
    assert 7 in [setting.value for setting in result.settings]


@over_table(
    ("argv", "says"),
    [
        ("--zero-stage 4", "`--zero-stage` must be one of 0, 1, 2, 3, but is `4`."),
        ("--zero-stage 1.5", "`--zero-stage` must be one of 0, 1, 2, 3, but is `1.5`."),
        ("--zero-stage", "`--zero-stage` must be followed by a value (0 | 1 | 2 | 3)."),
        ("--num-experts 64 many", "`--num-experts` must be an integer, but is `64 many`."),
        ("--num-experts-switch 8", "use `--num-experts` with `--moe-router-topk 1 --moe-router-pre-softmax`"),
        ("--DDP-impl FSDP", "`--DDP-impl FSDP` is not accepted"),
        ("--deepspeed", "`--deepspeed` must go with `--deepspeed_config FILE`, but no file is given"),
        ("--deepspeed_config ds.json", "`--deepspeed_config` must go with `--deepspeed`, but it is missing"),
        ("--deepspeed-config", "`--deepspeed_config` must be followed by a file, but no value follows."),
        (
            "--deepspeed --deepspeed_config a --deepspeed_config=b",
            "must be given once, but is given as a and b.",
        ),
        ("--deepscale_config ds.json", "use `--deepspeed` and `--deepspeed_config`"),
        ("--standalone-embedding-stage", "use `--pipeline-partition`"),
        ("--cpu-offloading", "activations are not offloaded layer by layer"),
        ("--nproc_per_node 8", "it belongs to the launcher"),
        ("--task STS-B", "has scores instead of labels, and regression is not offered"),
        ("--guess-file g", "belongs to tasks of prompted dialogues"),
        ("--task_list lambada", "are run by `megazero lm-eval`"),
        ("--fp8-param", "weights kept in fp8 and recipes of other projects are not offered"),
    ],
)
def test_refused_with_what_to_do(argv: str, says: str) -> None:
    result = scan([*argv.split(), "--num-layers", "7"])
    assert len(result.problems) == 1
    assert says in result.problems[0]
    assert [setting.value for setting in result.settings] == [7]


def test_a_switch_without_effect_swallows_no_value() -> None:
    assert len(scan(["--no-pipeline-parallel", "stray"]).problems) == 1


@over_table(
    ("argv", "path", "value"),
    [
        ("--zero-stage 1.0", "zero.stage", 1),
        ("--use-distributed-optimizer", "zero.stage", 1),
        ("--zero-reduce-bucket-size 9e7", "zero.bucket_size", 90_000_000),
        ("--zero-stage 3 --no-overlap-param-gather", "zero.overlap_param_gather", False),
        ("--accumulate-allreduce-grads-in-fp32", "zero.grad_accumulation_dtype", "fp32"),
        ("--enable-zbh1-pipeline", "parallel.pipeline_schedule", "zb-h1"),
        ("--num-layers-per-virtual-pipeline-stage 2", "parallel.num_layers_per_virtual_pipeline_stage", 2),
        ("--distribute-checkpointed-activations", "recompute.partition_activations", True),
        ("--checkpoint-in-cpu", "recompute.offload", True),
        ("--data-sharding", "data.data_sharding", True),
        ("--no-data-sharding", "data.data_sharding", False),
    ],
)
def test_flags_of_parallel_training_are_settings(argv: str, path: str, value: object) -> None:
    result = scan(argv.split())
    assert (result.problems, result.ignored) == ([], [])
    assert {setting.spec.path: setting.value for setting in result.settings}[path] == value


def test_no_pipeline_parallel_contradicts_pipeline_stages(tmp_path: Path) -> None:
    """Megatron-DeepSpeed scripts pass it beside ZeRO 2 and 3, where DeepSpeed has no pipeline."""
    argv = [*BASE_FLAGS, "--no-pipeline-parallel", "--zero-stage", "3"]
    assert parse_config(argv, world_size=2).config.zero.stage == 3
    file = tmp_path / "run.yaml"
    file.write_text("parallel: {pipeline_model_parallel_size: 2}\n")
    for more in (["--pipeline-model-parallel-size", "2"], ["--config", str(file)]):
        with pytest.raises(ConfigError) as caught:
            parse_config([*argv, *more], world_size=2)
        assert caught.value.violations == [
            "`--no-pipeline-parallel` is not accepted: it contradicts `--pipeline-model-parallel-size`; "
            "leave one of the two out (ZeRO stages 2 and 3 run under pipeline stages too)."
        ]


def test_the_command_line_of_a_megatron_deepspeed_script_is_read() -> None:
    """The flags of its 1.3B dense GPT example, with ZeRO off and no DeepSpeed engine."""
    argv = shlex.split("""--override-opt_param-scheduler --adam-beta1 0.9 --adam-beta2 0.95
        --tensor-model-parallel-size 1 --moe-expert-parallel-size 1 --num-experts 1 --moe-loss-coeff 0.01
        --moe-train-capacity-factor 1.0 --moe-eval-capacity-factor 1.0 --moe-min-capacity 4
        --init-method-std 0.013 --lr-decay-tokens 260000000000 --lr-warmup-tokens 375000000
        --micro-batch-size 4 --exit-duration-in-mins 30000000 --global-batch-size 512 --num-layers 24
        --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048
        --train-tokens 300000000000 --train-samples 146484375 --lr 2.0e-4 --min-lr 2.0e-5
        --lr-decay-style cosine --split 98,2,0 --log-interval 10 --eval-interval 100 --eval-iters 10
        --save-interval 10000 --weight-decay 0.1 --clip-grad 1.0 --hysteresis 2 --num-workers 0 --fp16
        --load ckpt --save ckpt --tensorboard-queue-size 1 --log-timers-to-tensorboard
        --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard --tensorboard-dir tb
        --checkpoint-activations --create-moe-param-group --vocab-file v --merge-file m --data-path d
        --data-impl mmap --zero-stage 0 --no-pipeline-parallel --deepspeed-activation-checkpointing""")
    resolved = parse_config([*argv, "--tokenizer-type", "GPT2BPETokenizer"], world_size=64)
    assert resolved.config.model.hidden_size == 2048
    assert resolved.config.training.train_tokens == 300_000_000_000
    assert resolved.config.model.num_experts == ()
    foreign, without_experts = resolved.warnings
    assert "--no-pipeline-parallel" in foreign
    assert without_experts == (
        "`moe_aux_loss_coeff` and `moe_expert_capacity_factor` and `moe_eval_capacity_factor` and "
        "`moe_min_capacity` have no effect without `num_experts`: no layer has experts."
    )


METRIC = '{"rarity": {"index_to_sample_path": "s", "index_to_metric_path": "m", "min_difficulty": 1, \
"max_difficulty": 9, "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 5}}}'


def test_a_curriculum_that_nothing_describes_is_refused() -> None:
    """The flag turns on in Megatron-DeepSpeed what its JSON describes."""
    flag = "--data-efficiency-curriculum-learning"
    with pytest.raises(ConfigError, match="say what makes samples difficult") as caught:
        parse_config([*BASE_FLAGS, flag])
    assert len(caught.value.violations) == 1
    lengths = [
        "--seqlen-schedule",
        "fixed_discrete",
        "--seqlen-difficulty",
        "16",
        "32",
        "--seqlen-max-step",
        "9",
    ]
    for described in (["--curriculum-metrics", METRIC], [*lengths, "--seqlen-max-step", "9"]):
        (line,) = parse_config([*BASE_FLAGS, flag, *described]).warnings
        assert line.startswith(f"flags without effect here: {flag} (metrics and lengths alone say")


def test_settings_of_a_curriculum_without_one_are_named() -> None:
    (line,) = parse_config([*BASE_FLAGS, "--curriculum-seed", "3"]).warnings
    assert line.startswith("`curriculum_seed` has no effect without `curriculum_metrics`")
