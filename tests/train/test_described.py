"""A description is bounded by the tensors beside it, whoever reads it, before anything is built from it."""

from __future__ import annotations

import math
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megazero.checkpoint.described import check_described, check_saved_model
from megazero.checkpoint.folder import iteration_folder
from megazero.checkpoint.manifest import STATE
from megazero.checkpoint.part import Key
from megazero.config.resolve import parse_config
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.errors import CheckpointError
from megazero.formats.hf.convert import convert_to_hf
from megazero.inference.sample_loss import measure_loss
from megazero.mpu.context import solo_context
from megazero.mpu.launch import Launch
from megazero.mpu.param_spec import spec_of
from megazero.train.parts.chunks import build_chunks
from megazero.train.parts.vocabulary import Vocabulary
from megazero.train.pretraining import pretrain
from megazero.train.resume.trained import load_for_inference
from tests.checkpoint.forged import edit
from tests.layouts.layout import VOCABULARY, Layout
from tests.tables import over_table

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --eval-iters 0 --train-iters 1 "
    "--tokenizer-type NullTokenizer --vocab-size 64 --device cpu"
)
WIDE, MANY = 1 << 40, 10**6


def tensors_of(model: ModelConfig) -> dict[Key, tuple[int, ...]]:
    """The weights of a model, without padding."""
    config = Layout().config().model_copy(update={"model": model})
    chunks = build_chunks(config, Vocabulary(VOCABULARY, VOCABULARY, None, None), solo_context())
    specs = [spec_of(parameter) for chunk in chunks.values() for parameter in chunk.parameters()]
    return {Key(spec.name): spec.shape for spec in specs}


MODELS = {
    layout.name: layout.config().model
    for layout in (
        Layout(),
        Layout(shape="llama"),
        Layout(shape="bert"),
        Layout(letters="M*-", layers=3),
        Layout(letters="ME", experts="shared"),
        Layout(letters="M"),
        *(Layout(experts=experts) for experts in ("biased", "shared", "noisy", "residual")),
    )
}
PYRAMID = {"num_layers": 4, "num_experts": (2, 8), "moe_layer_freq": (0, 1, 0, 1), "moe_ffn_hidden_size": 24}
MODELS["pyramid"] = Layout().config().model.model_copy(update=PYRAMID)
NARROW = {"ffn_hidden_size": 256, "moe_ffn_hidden_size": 8, "num_experts": (8,)}
MODELS["narrow"] = MODELS[Layout(experts="residual").name].model_copy(update=NARROW)
MODELS["classifier"] = MODELS[Layout(shape="bert").name].model_copy(
    update={"num_classes": 3, "untie_embeddings_and_output_weights": True}
)
MODELS["untied"] = Layout().config().model.model_copy(update={"untie_embeddings_and_output_weights": True})


@over_table("name", MODELS)
def test_every_model_is_described_by_itself_and_not_by_much_larger_ones(name):
    model = MODELS[name]
    tensors = tensors_of(model)
    check_saved_model(model, VOCABULARY, tensors, "here")
    total = sum(map(math.prod, tensors.values()))
    for field, value in (("num_layers", model.num_layers + 1), ("hidden_size", 2 * model.hidden_size)):
        larger = model.model_copy(update={field: value})
        with pytest.raises(CheckpointError, match="`here` must describe the tensors beside it, but"):
            check_saved_model(larger, VOCABULARY, tensors, "here")
    with pytest.raises(CheckpointError, match=f"makes at least [0-9]+ weights, and they hold {total};"):
        check_saved_model(model, VOCABULARY + total // model.hidden_size // 2, tensors, "here")


@over_table(
    ("changes", "words"),
    [
        ({"moe_layer_freq": (0, 1)}, "`moe_layer_freq` is of 2 layers, and there are 4"),
        ({"no_rope_freq": (1, 0, 0)}, "`no_rope_freq` is of 3 layers, and there are 4"),
        ({"num_experts": (2, 8, 8)}, "`num_experts` is of 3 layers, and 2 have experts"),
        ({"moe_ffn_hidden_size": WIDE}, f"`moe_ffn_hidden_size` makes {WIDE}, and none has more than"),
        ({"moe_shared_expert_intermediate_size": WIDE}, "`moe_shared_expert_intermediate_size` makes"),
        ({"num_classes": WIDE}, "`num_classes` makes"),
    ],
)
def test_what_is_wrong_with_experts_and_heads_is_named(changes, words):
    model = MODELS["pyramid"]
    with pytest.raises(CheckpointError, match=words):
        check_saved_model(model.model_copy(update=changes), VOCABULARY, tensors_of(model), "here")


def test_nothing_is_in_no_tensors():
    with pytest.raises(CheckpointError, match="`hidden_size` makes 32|`vocab_size` makes"):
        check_described(MODELS["untied"], VOCABULARY, [], 99, "here")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A dense run and one with experts."""
    found = {"": tmp_path_factory.mktemp("dense"), "--num-experts 4": tmp_path_factory.mktemp("experts")}
    for extra, folder in found.items():
        pretrain(parse_config([*f"{SMALL} {extra}".split(), "--save", str(folder)], world_size=1).config)
    return found


def generate(run: Path, extra: str) -> None:
    load_for_inference(str(run), Launch())


def to_hf(run: Path, extra: str) -> None:
    convert_to_hf(run, run / "out", tokenizer=TokenizerConfig())


def resume(run: Path, extra: str) -> None:
    pretrain(parse_config([*f"{SMALL} {extra}".split(), "--load", str(run)], world_size=1).config)


def teach(run: Path, extra: str) -> None:
    argv = [*SMALL.split(), "--kd", "--load-teacher", str(run)]
    pretrain(parse_config(argv, world_size=1).config)


def analyze(run: Path, extra: str) -> None:
    argv = [*f"{SMALL} {extra}".split(), "--load", str(run)]
    config = parse_config(argv, world_size=1).config
    list(measure_loss(config, solo_context(), run / "out"))


@over_table("read", [generate, to_hf, resume, teach, analyze])
@over_table(
    ("setting", "changes", "extra"),
    [
        ("num_layers", {"num_layers": MANY}, ""),
        ("num_layers", {"num_layers": 10**15}, "--num-experts 4"),
        ("hidden_size", {"hidden_size": WIDE}, ""),
        ("hidden_size", {"hidden_size": WIDE}, "--num-experts 4"),
        ("vocab_size", {"vocab_size": WIDE}, ""),
        ("max_position_embeddings", {"max_position_embeddings": WIDE}, ""),
        ("num_experts", {"num_experts": [10**12]}, "--num-experts 4"),
    ],
)
def test_every_reader_refuses_at_once_what_the_files_cannot_hold(
    runs, tmp_path, read: Callable[[Path, str], Any], setting, changes, extra
):
    run = tmp_path / "run"
    shutil.copytree(runs[extra], run)
    state = iteration_folder(run, 1) / STATE
    edit(state, lambda facts: facts["config"]["model"].update(changes))
    began, peak = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError) as caught:
        read(run, extra)
    assert f"`{state}` must describe the tensors beside it, but `{setting}`" in str(caught.value)
    assert time.perf_counter() - began < 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 50 << 10  # KiB


def test_padding_that_a_description_asks_for_is_not_made(runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs[""], run)
    change = {"make_vocab_size_divisible_by": WIDE, "seq_length": WIDE, "max_position_embeddings": 16}
    edit(iteration_folder(run, 1) / STATE, lambda facts: facts["config"]["model"].update(change))
    (chunk,) = load_for_inference(str(run), Launch()).chunks.values()
    assert chunk.embedding.word.shape == (65, 32)
