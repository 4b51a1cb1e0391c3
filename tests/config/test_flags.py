"""The command line: spellings, switches, clashes, and every problem at once."""

from __future__ import annotations

import shlex

from megazero.config.compat.foreign import FOREIGN_FLAGS
from megazero.config.flags import FLAGS, scan
from tests.tables import over_table


def values(*argv: str) -> dict[str, object]:
    result = scan(argv)
    assert result.problems == []
    return {setting.spec.path: setting.value for setting in result.settings}


@over_table(
    ("argv", "expected"),
    [
        ("--num-layers 24", {"model.num_layers": 24}),
        ("--num-layers=24", {"model.num_layers": 24}),
        ("--init-method-std -1", {"model.init_method_std": -1.0}),
        ("--disable-bias-linear", {"model.add_bias_linear": False}),
        ("--sequence-parallel", {"parallel.sequence_parallel": True}),
        ("--sequence-parallel=false", {"parallel.sequence_parallel": False}),
        ("--no-overlap-grad-reduce", {"zero.overlap_grad_reduce": False}),
        ("--no-overlap-grad-reduce=false", {"zero.overlap_grad_reduce": True}),
        ("--overlap-grad-reduce", {"zero.overlap_grad_reduce": True}),
        ("--fp16", {"precision.dtype": "fp16"}),
        ("--params-dtype BF16", {"precision.dtype": "bf16"}),
        ("--model-parallel-size 2", {"parallel.tensor_model_parallel_size": 2}),
        ("--num-key-value-heads 4", {"model.num_query_groups": 4}),
        ("--override-opt_param-scheduler", {"checkpoint.override_opt_param_scheduler": True}),
        ("--checkpoint-activations", {"recompute.granularity": "full"}),
        # Megatron 2 recomputed whole layers wherever a method was given.
        (
            "--activations-checkpoint-method block",
            {"recompute.method": "block", "recompute.granularity": "full"},
        ),
        ("--activations-checkpoint-num-layers 2", {"recompute.num_layers": 2}),
        ("--tokenizer-type HuggingFaceTokenizer", {"tokenizer.tokenizer_type": "HFTokenizer"}),
        ("--tokenizer-type Llama2Tokenizer", {"tokenizer.tokenizer_type": "Llama2Tokenizer"}),
        ("--num-query-groups 2 --group-query-attention", {"model.num_query_groups": 2}),
        ("--rampup-batch-size 16 8 1e6", {"batch.rampup_batch_size": (16, 8, 1_000_000)}),
        ("--data-path 0.3 a 0.7 b --lr 1", {"data.data_path": ("0.3", "a", "0.7", "b"), "optimizer.lr": 1.0}),
        ("--data-path=a", {"data.data_path": ("a",)}),
        ("--num-experts 32 64 --lr 1", {"model.num_experts": (32, 64), "optimizer.lr": 1.0}),
        ("--num-moe-experts 8", {"model.num_experts": (8,)}),
        ("--moe-layer-freq=([0]*1+[1]*2)", {"model.moe_layer_freq": (0, 1, 1)}),
        ("--topk 1", {"model.moe_router_topk": 1}),
        ("--moe-loss-coeff 0.01", {"model.moe_aux_loss_coeff": (0.01,)}),
        ("--moe-aux-loss-coeff 0.1 0.2", {"model.moe_aux_loss_coeff": (0.1, 0.2)}),
        ("--moe-token-dispatcher-type alltoall_seq", {"parallel.moe_token_dispatcher_type": "alltoall"}),
        (
            "--disable-moe-token-dropping",
            {"model.moe_expert_capacity_factor": None, "model.moe_eval_capacity_factor": None},
        ),
        ("--enable-expert-tensor-parallelism", {"parallel.expert_tensor_parallel_size": None}),
        ("--moe-expert-parallel-size 2", {"parallel.expert_model_parallel_size": 2}),
        ("--disable-moe-top2-2nd-expert-sampling", {"model.moe_router_sampling": "none"}),
    ],
)
def test_one_flag(argv: str, expected: dict[str, object]) -> None:
    assert values(*argv.split()) == expected


@over_table(
    ("argv", "field", "value"),
    [
        # What Megatron scripts write for Llama: rotary positions, no learned ones.
        (
            "--use-rotary-position-embeddings --no-position-embedding",
            "model.position_embedding_type",
            "rope",
        ),
        ("--no-position-embedding", "model.position_embedding_type", "none"),
        # Unfused, Megatron computes torch's exact GELU; fused, the tanh form.
        ("--no-bias-gelu-fusion", "model.activation", "gelu_exact"),
        ("--no-bias-gelu-fusion --swiglu", "model.activation", "swiglu"),
        ("--no-bias-gelu-fusion --squared-relu", "model.activation", "squared_relu"),
        (
            "--moe-train-capacity-factor 1.0 --moe-expert-capacity-factor 2",
            "model.moe_expert_capacity_factor",
            2.0,
        ),
        # Saying the same thing several ways is no clash.
        (
            "--checkpoint-activations --deepspeed-activation-checkpointing --recompute-granularity full",
            "recompute.granularity",
            "full",
        ),
    ],
)
def test_flags_that_go_together(argv: str, field: str, value: str) -> None:
    assert values(*argv.split()) == {field: value}


@over_table(
    ("argv", "problem"),
    [
        (
            "--fp16 --bf16",
            "`precision.dtype` must be set one way, but `--fp16` says fp16 and `--bf16` says bf16; keep "
            "one of these flags.",
        ),
        (
            "--swiglu --squared-relu",
            "`model.activation` must be set one way, but `--swiglu` says swiglu and `--squared-relu` says "
            "squared_relu; keep one of these flags.",
        ),
        (
            "--model-parallel-size 2 --tensor-model-parallel-size 4",
            "`parallel.tensor_model_parallel_size` must be set one way, but `--model-parallel-size` says 2 "
            "and `--tensor-model-parallel-size` says 4; keep one of these flags.",
        ),
        (
            "--activations-checkpoint-method uniform --recompute-granularity selective",
            "`recompute.granularity` must be set one way, but `--activations-checkpoint-method` says full "
            "and "
            "`--recompute-granularity` says selective; keep one of these flags.",
        ),
        (
            "--enable-expert-tensor-parallelism --expert-tensor-parallel-size 1",
            "`parallel.expert_tensor_parallel_size` must be set one way, but "
            "`--enable-expert-tensor-parallelism` says the default and `--expert-tensor-parallel-size` says "
            "1; keep one of these flags.",
        ),
        (
            "--num-experts 8 16 --num-moe-experts 8",
            "`model.num_experts` must be set one way, but `--num-experts` says 8 16 and `--num-moe-experts` "
            "says 8; keep one of these flags.",
        ),
        ("--num-experts --fp16", "`--num-experts` must be followed by a value (int ...)."),
        ("--hiden-size 64", "unknown flag `--hiden-size`; did you mean `--hidden-size`?"),
        ("--hiden_size 64", "unknown flag `--hiden_size`; did you mean `--hidden-size`?"),
        ("--xyzzy", "unknown flag `--xyzzy`; see --help."),
        ("--num-lay 3", "unknown flag `--num-lay`; did you mean `--num-layers`?"),
        ("-n 3", "unknown flag `-n`; see --help."),
        ("--lr", "`--lr` must be followed by a value (float)."),
        ("--data-path --fp16", "`--data-path` must be followed by a value (text ...)."),
        (
            "stray --fp16",
            "unexpected argument `stray`: values belong after a flag; quote those that hold blanks.",
        ),
        (
            "--split 949, 50, 1",
            "unexpected argument `50,`: values belong after a flag; quote those that hold blanks.",
        ),
        ("--fp16=yes", "`--fp16` is a switch that takes no value, but is `yes`."),
        ("--sequence-parallel=2", "`--sequence-parallel` is a switch that takes true or false, but is `2`."),
        ("--num-layers x", "`--num-layers` must be an integer, but is `x`."),
        ("--config", "`--config` must be followed by a file, but no value follows."),
        ("--config a --config b", "`--config` must be given once, but is given as a and b."),
        ("--check-config=1", "`--check-config` must stand without a value, but has `1`."),
    ],
)
def test_problems(argv: str, problem: str) -> None:
    assert problem in scan(argv.split()).problems


def test_all_problems_are_collected() -> None:
    argv = shlex.split("--hiden-size 64 --num-layers x --fp16 --bf16 --deepspeed --lr --seq-lenght 3")
    assert len(scan(argv).problems) == 6


def test_reading_goes_on_after_an_unknown_flag() -> None:
    result = scan(shlex.split("--hiden-size 64 --num-layers 3"))
    assert [(s.spec.name, s.value) for s in result.settings] == [("num_layers", 3)]


def test_a_repeated_flag_keeps_its_last_value_and_warns() -> None:
    result = scan(shlex.split("--lr 1e-3 --lr 2e-3"))
    assert [s.value for s in result.settings] == [2e-3]
    assert result.problems == []
    assert result.warnings == ["`--lr` is given more than once (as 0.001, then 0.002); the last is used."]
    assert scan(shlex.split("--lr 1e-3 --lr 1e-3")).warnings == []


def test_the_input_is_not_changed_and_the_scan_keeps_no_state() -> None:
    argv = ["--lr", "1", "--no-pipeline-parallel"]
    first, second = scan(argv), scan(argv)
    assert argv == ["--lr", "1", "--no-pipeline-parallel"]
    assert [i.name for i in first.ignored] == [i.name for i in second.ignored] == ["--no-pipeline-parallel"]


def test_no_flag_is_both_ours_and_foreign() -> None:
    assert not set(FLAGS) & set(FOREIGN_FLAGS)


def test_a_value_that_begins_with_a_dash_is_one_problem_that_names_the_equals_sign() -> None:
    result = scan(["--hybrid-layer-pattern", "--MM"])
    assert result.problems == [
        "`--hybrid-layer-pattern` must be followed by a value; one that begins with a dash is joined to it "
        "by an equals sign: `--hybrid-layer-pattern=--MM`."
    ]
    assert [setting.value for setting in result.settings] == ["--MM"]
    # A flag that is only misspelled stays one.
    assert "unknown flag `--sve-interval`" in scan(["--save", "--sve-interval", "5"]).problems[1]
