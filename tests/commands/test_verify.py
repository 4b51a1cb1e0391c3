"""`megazero verify`: a user's flags, shrunk, run and judged."""

from __future__ import annotations

import json
import tempfile

import pytest

from megazero.commands import verify as command
from megazero.commands.verify import main, serial_of
from megazero.config.heterogeneous.shapes import LayerShape, text_of
from megazero.config.resolve import parse_config
from megazero.config.rules.table import check
from megazero.config.steps import SequenceLengths
from megazero.config.training_plan import training_plan_of
from megazero.train.step.skipping import SkippingPlan
from megazero.verify import compare
from megazero.verify.shrink import shrink

BASE = [
    "--num-layers",
    "12",
    "--hidden-size",
    "768",
    "--num-attention-heads",
    "12",
    "--seq-length",
    "128",
    "--micro-batch-size",
    "4",
]
BASE += ["--global-batch-size", "64", "--lr", "1e-3", "--train-iters", "10", "--vocab-size", "1000"]


@pytest.mark.fast
def test_a_pipeline_with_zero_is_the_same_training(capsys):
    assert main([*BASE, "--pipeline-model-parallel-size", "2", "--zero-stage", "3", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "tensor 1 x pipeline 2 x data 2, ZeRO stage 3" in out
    assert out.count("ok  ") == 5
    assert out.endswith("the same training as one process\n")


@pytest.mark.parametrize(
    "flags",
    [
        "onebit-adam --onebit-freeze-step 1",
        "zero-one-adam --zero-one-var-freeze-step 1",
        "onebit-lamb --onebit-freeze-step 1",
    ],
)
def test_compressed_optimizers_are_verified_where_they_sum_exactly(flags, capsys):
    argv = [*BASE, "--optimizer", *flags.split(), "--tensor-model-parallel-size", "2", "--world-size", "4"]
    assert main([*argv, "--steps", "3"]) == 0
    out = capsys.readouterr().out
    assert f"{flags.split()[0]} sums exactly: compressed sums depend on the replicas" in out
    assert out.endswith("the same training as one process\n")


def test_variants_of_attention_are_verified_with_windows_that_hide_something(capsys):
    flags = "--window-size 4095,0 --window-attn-skip-freq [0]*1+[1]*3 --position-embedding-type alibi "
    flags += "--max-position-embeddings 8192 --softmax-type learnable --num-layers 4"
    argv = [*BASE, *flags.split()]
    assert main([*argv, "--tensor-model-parallel-size", "2", "--world-size", "4", "--steps", "3"]) == 0
    assert capsys.readouterr().out.endswith("the same training as one process\n")
    config = parse_config([*argv, "--mock-data"], world_size=1).config
    assert shrink(config, 1).config.model.windows == ((3, 0), None)


def test_both_stacks_are_verified(capsys):
    """Shrunk to four layers, of which a model of one stack would have two."""
    flags = "--model-family t5 --decoder-num-layers 6 --position-embedding-type relative"
    argv = [*BASE, *flags.split(), "--decoder-seq-length", "64", "--pipeline-model-parallel-size", "2"]
    assert main([*argv, "--tensor-model-parallel-size", "2", "--world-size", "4", "--steps", "2"]) == 0
    assert capsys.readouterr().out.endswith("the same training as one process\n")
    config = parse_config([*argv, "--mock-data"], world_size=2).config
    assert (config.model.num_layers, config.model.encoder_layers) == (18, 12)
    small = shrink(config, 8).config.model
    assert (small.num_layers, small.t5_encoder_layers, small.t5_decoder_layers) == (4, 2, 2)
    assert small.decoder_length < small.seq_length


def test_each_kind_of_layer_is_left_in_a_hybrid_model_that_is_shrunk(capsys):
    flags = "--hybrid-layer-pattern M-M-M*M-M-ME --mamba-num-groups 4 --num-experts 8"
    argv = [*BASE, *flags.split(), "--tensor-model-parallel-size", "2"]
    assert main([*argv, "--world-size", "2", "--steps", "2"]) == 0
    assert capsys.readouterr().out.endswith("the same training as one process\n")
    small = shrink(parse_config([*argv, "--mock-data"], world_size=2).config, 2).config
    assert (small.model.layer_kinds, check(small, 2)) == ("M-*E", [])


def test_layers_of_each_shape_are_left_in_a_model_that_is_shrunk(capsys):
    widths = ((12, 512), (2, 512), (0, 96), (2, 512), (12, 0))
    shapes = tuple(LayerShape(*sizes) for sizes in widths)
    flags = ["--heterogeneous-layers-config-encoded-json", text_of(shapes), "--num-layers", "5"]
    argv = [*BASE, *flags, "--tensor-model-parallel-size", "2"]
    assert main([*argv, "--world-size", "2", "--steps", "2"]) == 0
    assert capsys.readouterr().out.endswith("the same training as one process\n")
    small = shrink(parse_config([*argv, "--mock-data"], world_size=2).config, 2).config
    assert small.model.layer_shapes == (
        *(LayerShape(4, 32), LayerShape(2, 32)),
        *(LayerShape(0, 16), LayerShape(4, 0)),
    )


def test_tokens_and_layers_are_still_left_out_when_shrunk(capsys):
    skips = "--random-ltd --random-ltd-min-value 16 --random-ltd-require-steps 9 --random-ltd-layer-num 10"
    argv = [*BASE, *skips.split(), "--progressive-layer-drop", "--tensor-model-parallel-size", "2"]
    assert main([*argv, "--world-size", "2", "--steps", "4"]) == 0
    assert capsys.readouterr().out.endswith("the same training as one process\n")
    small = shrink(parse_config([*argv, "--mock-data"], world_size=2).config, 1).config
    training_plan = training_plan_of(small, 1)
    plan = SkippingPlan.of(small.skipping, small.model.num_layers, small.training.seed, training_plan)
    found = [plan.at(training_plan.before(n)) for n in range(5)]
    assert [each.kept for each in found] == [small.model.seq_length // 2] * 4 + [None]
    assert min(each.layers_run for each in found) < small.model.num_layers


@pytest.mark.parametrize(
    "flags",
    [
        "--sparse-attention fixed --sparse-num-local-blocks 8 --sparse-block 8 "
        "--sparse-different-layout-per-head --sparse-num-different-global-patterns 4",
        "--sparse-attention bigbird --sparse-num-random-blocks 3 --sparse-num-sliding-window-blocks 5",
        "--sparse-attention variable --sparse-local-window-blocks 2 6 --sparse-global-block-indices 1 5 "
        "--sparse-global-block-end-indices 3 7",
    ],
)
def test_attention_is_still_sparse_when_it_is_shrunk(flags, capsys):
    argv = [*BASE, *flags.split(), "--tensor-model-parallel-size", "2", "--world-size", "2", "--steps", "2"]
    assert main(argv) == 0
    assert capsys.readouterr().out.endswith("the same training as one process\n")
    small = shrink(parse_config([*argv[:-4], "--mock-data"], world_size=2).config, 1).config
    assert check(small, 2) == []
    assert small.model.sparse_attention == flags.split()[1]


def test_a_curriculum_still_grows_when_it_is_shrunk(capsys):
    grows = "--seqlen-schedule fixed_linear --seqlen-min-difficulty 32 --seqlen-total-curriculum-step 8"
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --world-size 2 --steps 3"
    assert main([*BASE, *grows.split(), *layout.split()]) == 0
    assert capsys.readouterr().out.endswith("the same training as one process\n")
    argv = [*BASE, *grows.split(), *layout.split()[:3], "--mock-data"]
    config = parse_config(argv, world_size=2).config
    small = shrink(config, 1).config
    assert [length for _, length in SequenceLengths.of(small.curriculum, small.model.seq_length).pieces] == [
        8,
        16,
    ]
    assert small.model.seq_length == 16


def test_samples_are_drawn_by_difficulty_from_made_up_indexes(capsys):
    """Those that it names need not be there."""
    metric = {
        "index_to_sample_path": "nowhere",
        "difficulty_type": "percentile",
        "min_difficulty": 1,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 9},
    }
    given = ["--curriculum-metrics", json.dumps({"rarity": metric, "length": metric})]
    assert main([*BASE, *given, "--pipeline-model-parallel-size", "2", "--steps", "4"]) == 0
    out = capsys.readouterr().out
    assert "shrunk     samples are drawn by difficulty from 97 random ones, with made-up indexes" in out
    assert out.endswith("the same training as one process\n")
    plain = ["--pipeline-model-parallel-size", "2", "--steps", "4"]
    assert main([*BASE, *plain]) == 0
    assert capsys.readouterr().out.split("lm loss")[1] != out.split("lm loss")[1]


def test_a_student_gets_a_teacher_of_its_own_and_the_lessons_end(capsys):
    """The one that it names need not be there, and would not fit a shrunk student."""
    distillation = [
        "--mos",
        "--load-teacher",
        "nowhere",
        "--kd-train-iters",
        "7",
        "--num-layers-teacher",
        "24",
    ]
    assert main([*BASE, *distillation, "--pipeline-model-parallel-size", "2", "--steps", "4"]) == 0
    out = capsys.readouterr().out
    assert "shrunk     the teacher is a new one with twice the student's layers" in out
    (line,) = [line for line in out.splitlines() if line.startswith("kd loss")]
    values = line.removeprefix("kd loss").split()
    assert values[3] == "-"
    assert all(float(value) > 0.01 for value in values[:3])
    assert out.endswith("the same training as one process\n")


def test_a_fine_tuning_is_verified_without_its_files(capsys):
    task = ["--task", "classification", "--text-columns", "a", "--train-data", "none.tsv"]
    flags = [word for word in BASE if word not in ("--train-iters", "10")]
    layout = ["--tensor-model-parallel-size", "2", "--world-size", "2", "--steps", "2"]
    assert main([*flags, *task, *layout]) == 0
    out = capsys.readouterr().out
    assert "task loss" in out
    assert "accuracy" in out
    assert out.endswith("the same training as one process\n")


@pytest.mark.parametrize("optimizer", ["lion", "adagrad", "rmsprop", "muon"])
def test_other_optimizers_are_verified(optimizer, capsys):
    """Two replicas x two slices, with biases and all, as the user asks."""
    layout = ["--tensor-model-parallel-size", "2", "--zero-stage", "1", "--world-size", "4", "--steps", "2"]
    assert main([*BASE, *layout, "--optimizer", optimizer]) == 0
    assert capsys.readouterr().out.endswith("the same training as one process\n")


ENCODER = [*BASE, "--model-family", "bert", "--steps", "2"]


@pytest.mark.parametrize(
    "flags",
    [
        "--pipeline-model-parallel-size 2 --zero-stage 2",
        "--tensor-model-parallel-size 2 --sequence-parallel --bert-no-binary-head",
        # Dropout is on, and which elements are dropped depends on which samples share a row.
        "--bert-pack --tensor-model-parallel-size 2 --apply-residual-connection-post-layernorm",
    ],
)
def test_so_is_a_bert_of_any_kind(flags, capsys):
    assert main([*ENCODER, *flags.split()]) == 0
    out = capsys.readouterr().out
    assert ("sop loss" in out) == ("no-binary-head" not in flags)
    assert out.endswith("the same training as one process\n")


def test_a_difference_is_reported_and_fails(capsys, monkeypatch):
    real = compare.compare
    monkeypatch.setattr(
        command, "compare", lambda records, expected: real(records, expected, compare.Tolerance(loss=1e-30))
    )
    assert main([*BASE, "--tensor-model-parallel-size", "2", "--steps", "2"]) == 1
    out = capsys.readouterr().out
    assert "BAD        lm loss" in out
    assert out.endswith("NOT the same training as one process\n")


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([*BASE, "--tensor-model-parallel-size", "5"], "rule heads_over_tensor_ranks"),
        ([*BASE, "--world-size", "3", "--tensor-model-parallel-size", "2"], "rule world_size_factors"),
        ([*BASE, "--no-such-flag"], "--no-such-flag"),
        ([*BASE, "--ranks", "0"], "must be at least 1"),
    ],
)
def test_bad_input_is_refused(argv, reason, capsys):
    assert main(argv) == 2
    assert reason in capsys.readouterr().err


HUGE = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --micro-batch-size 1 "
    "--global-batch-size 1536 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 "
    "--sequence-parallel --num-layers-per-virtual-pipeline-stage 3 --bf16 --lr 6e-5 --lr-decay-iters 100 "
    "--lr-warmup-fraction 0.01 --train-samples 100000 --vocab-size 50257 --checkpoint-activations "
    "--zero-stage 1 --mock-data"
)
GROUPED = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 16 --num-key-value-heads 4 --seq-length 256 "
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--ffn-hidden-size 1408 --micro-batch-size 2 --global-batch-size 64 --rampup-batch-size 16 16 100 "
    "--lr 1e-3 "
    "--train-tokens 1000000 --lr-decay-tokens 900000 --vocab-size 1000 --pipeline-model-parallel-size 4 "
    "--pipeline-partition 1,3,3,1 --zero-stage 3 --zero-hpz-partition-size 2 --mock-data --fp16"
)


@pytest.mark.parametrize(
    ("flags", "world", "sizes"), [(HUGE, 1024, (2, 2, 2)), (GROUPED, 16, (1, 2, 4)), (GROUPED, 8, (1, 4, 2))]
)
def test_shrinking_keeps_the_layout_and_breaks_no_rule(flags, world, sizes):
    config = parse_config(flags.split(), world_size=world).config
    replicas = world // (
        config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size
    )
    small = shrink(config, replicas)
    grid = small.grid
    assert (grid.tp, grid.pp, grid.dp) == sizes
    assert check(small.config, grid.world_size) == []
    assert check(serial_of(small.config), 1) == []
    assert small.config.zero.stage == config.zero.stage
    assert small.config.recompute == config.recompute
    assert small.config.parallel.sequence_parallel == config.parallel.sequence_parallel
    assert small.config.model.activation == config.model.activation
    assert (small.config.model.kv_heads < small.config.model.num_attention_heads) == (
        config.model.kv_heads < config.model.num_attention_heads
    )


def test_codes_are_left_out_and_that_is_said():
    """A run over codes is not one process's to rounding, but its layout is."""
    codes = "--zero-quantized-weights int8 --zero-quantized-gradients int4"
    config = parse_config([*GROUPED.split(), *codes.split()], world_size=16).config
    small = shrink(config, 4)
    assert small.notes[-1] == "weights and gradients are sent as they are, not as codes"
    assert check(small.config, small.grid.world_size) == []
    assert check(serial_of(small.config), 1) == []


def test_a_disk_that_is_elsewhere_is_not_needed(tmp_path):
    flags = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 90 --mock-data "
        "--micro-batch-size 1 --lr 1e-3 --train-iters 9 --offload-optimizer nvme "
        f"--offload-path {tmp_path}/gone"
    )
    config = parse_config(flags.split(), world_size=2).config
    found = shrink(config, 2).config.offload
    assert (found.optimizer, found.path) == ("nvme", tempfile.gettempdir())


@pytest.mark.parametrize("flags", ["", "--context-parallel-size 2 --cp-comm-type p2p"])
def test_layers_of_sizes_of_their_own_stay_possible(flags):
    text = text_of((LayerShape(8, 64), LayerShape(0, 32)))
    words = f"--hidden-size 64 --num-attention-heads 8 --seq-length 32 --vocab-size 61 --mock-data {flags}"
    words += " --micro-batch-size 1 --lr 1e-3 --train-iters 3 --tensor-model-parallel-size 2"
    argv = [*words.split(), "--heterogeneous-layers-config-encoded-json", text]
    small = shrink(parse_config(argv, world_size=4 if flags else 2).config, 1)
    assert check(small.config, small.grid.world_size) == []
    shapes = small.config.model.layer_shapes
    assert shapes is not None
    assert {shape.groups for shape in shapes} == {0, small.config.model.num_attention_heads}


def test_ranks_are_at_most_as_many_as_asked_for(capsys):
    config, replicas = command.resolve(BASE, None, 1)
    assert shrink(config, replicas, 1).grid.world_size == 1
    assert main([*BASE, "--tensor-model-parallel-size", "2", "--ranks", "1"]) == 2
    assert "`--ranks` must be at least 2 for this layout" in capsys.readouterr().err
