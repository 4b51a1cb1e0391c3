"""Whole jobs on trained models: errors, ranks, reports, and what is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch

from megazero.checkpoint.part import Key, Part
from megazero.commands.generate import main as generate
from megazero.commands.quantize import main
from megazero.errors import CheckpointError, ConfigError, NumericsError
from megazero.formats.hf.reader import HFReader
from megazero.mpu.context import solo_context
from megazero.quantize.blocks import BlockModel
from megazero.quantize.export import Layout
from megazero.quantize.gptq import Gptq
from megazero.quantize.job import quantize
from megazero.quantize.layers import LayerQuantizer
from megazero.quantize.recipe import Recipe
from tests.formats.hf.descendants import SAMPLES
from tests.quantize.samples import EXPERTS, LLAMA, SHAPE, quantized, tensors, train
from tests.source_tree import ROOT
from tests.tables import over_table

W4 = Recipe.of("W4", "gptq", 16)


def test_gptq_is_below_rounding_on_every_layer(llama, tmp_path):
    report = quantized(llama, tmp_path / "out", W4)
    assert len(report.weights) == 8
    assert all(row.error < row.rounded_error for row in report.weights)
    assert [row.method for row in report.weights] == ["gptq"] * 8
    rows, columns = 96, 32
    assert (report.weights[0].bytes_before, report.weights[0].bytes_after) == (
        4 * rows * columns,
        rows * columns // 2 + 4 * rows * 2,
    )
    held = sum(t.nbytes for name, t in tensors(tmp_path / "out").items() if not name.endswith("shape"))
    assert report.sizes[1] == held
    before, after = report.perplexities
    assert before < 8 < 64
    assert abs(after / before - 1) < 0.1
    assert set(report.skipped) == {
        *("model.embed_tokens", "model.norm", "lm_head"),
        *("model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm"),
    }
    text, stored = (
        (tmp_path / "out" / f"quantization_report.{kind}").read_text() for kind in ("txt", "json")
    )
    assert text == report.as_text()
    assert "layers.1.mlp.down.weight" in text
    assert json.loads(stored)["perplexities"] == [before, after]


@over_table("scheme", ["W8", "W8A8"])
def test_8_bits_are_within_half_a_percent(llama, scheme, tmp_path):
    before, after = quantized(llama, tmp_path / scheme, Recipe.of(scheme, "rtn")).perplexities
    assert abs(after / before - 1) < 0.005


def test_the_perplexities_are_those_of_whole_models(llama, runs, tmp_path):
    """Measured block by block, they are what a model that is loaded from the folder has."""
    report = quantized(llama, tmp_path / "out", W4)
    losses = []
    for folder in (llama, tmp_path / "out"):
        with BlockModel.opened(str(folder), torch.device("cpu"), 16) as model:
            _, samples = model.samples(str(runs / "text"), "90,10,0", (1, 10))
            walk = LayerQuantizer(model, W4, solo_context().world, (None, samples), ())
            for _ in walk.blocks():
                pass
            losses.append(walk.losses[0])
    assert losses == [report.losses[0], pytest.approx(report.losses[1], abs=1e-6)]


@pytest.mark.parametrize(
    ("name", "method"),
    [("llama", "gptq"), ("llama", "awq"), ("experts", "gptq"), ("gpt2", "awq"), ("llama", "smoothquant")],
)
def test_files_are_equal_on_any_number_of_ranks(request, name, method, tmp_path):
    recipe = Recipe.of("W8A8", method) if method == "smoothquant" else Recipe.of("W4", method, 16)
    load, written = request.getfixturevalue(name), []
    for ranks in (1, 2, 3):
        report = quantized(load, tmp_path / str(ranks), recipe, ranks)
        written.append(((tmp_path / str(ranks) / "model.safetensors").read_bytes(), report))
    assert written[0] == written[1] == written[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", "--tensor-model-parallel-size 2 --sequence-parallel"),
        ("llama", "--pipeline-model-parallel-size 2 --zero-stage 1"),
        ("experts", "--expert-model-parallel-size 2"),
    ],
)
def test_codes_are_those_of_the_weights_whatever_layout_saved_them(request, name, layout, tmp_path):
    """A step that changes nothing, on two ranks, saves the same weights in other pieces."""
    load = request.getfixturevalue(name)
    saved = load.parent / f"{name} {layout}"
    flags = f"{SHAPE} {EXPERTS if name == 'experts' else LLAMA} {layout} --train-iters 41 --lr 1e-30".split()
    flags += ["--data-path", str(load.parent / "text"), "--load", str(load), "--save", str(saved)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [*launcher, "pretrain_gpt.py", *flags, "--micro-batch-size", "4", "--no-load-optim", "--finetune"],
        check=True,
        cwd=ROOT,
        capture_output=True,
    )
    written = []
    for number, run in enumerate((load, saved)):
        quantized(run, tmp_path / str(number), W4, 1 + number)
        written.append((tmp_path / str(number) / "model.safetensors").read_bytes())
    assert written[0] == written[1]


def test_scaling_lowers_the_errors(gpt2, llama, tmp_path):
    report = quantized(llama, tmp_path / "awq", Recipe.of("W4", "awq", 16))
    assert all(row.error <= row.rounded_error * 1.001 for row in report.weights)
    assert sum(row.method == "awq" for row in report.weights) > 2
    smooth = quantized(gpt2, tmp_path / "smooth", Recipe.of("W8A8", "smoothquant"))
    assert {row.method for row in smooth.weights} == {"smoothquant", "smoothquant, unscaled"}
    before, after = smooth.perplexities
    assert abs(after / before - 1) < 0.005


def test_experts_with_fewer_tokens_than_inputs_are_rounded(experts, tmp_path, monkeypatch):
    report = quantized(experts, tmp_path / "some", W4)
    methods = {row.name.split(".", 2)[2]: row.method for row in report.weights}
    assert methods["mlp.experts.up.weight"] == "gptq"
    monkeypatch.setattr("tests.quantize.samples.SAMPLES", 3)  # 96 choices of 4 experts with 32 and 48 inputs
    report = quantized(experts, tmp_path / "few", W4)
    few = [row.method for row in report.weights if "experts.down" in row.name]
    assert any("rtn (" in method and " tokens)" in method for method in few)
    assert report.skipped.count("model.layers.*.block_sparse_moe.gate") == 1


def test_experts_are_measured_in_parts_if_they_are_many(experts, tmp_path, monkeypatch):
    whole = quantized(experts, tmp_path / "whole", W4)
    monkeypatch.setattr("megazero.quantize.layers._GRAM_BYTES", 3 * 8 * 32 * 32)
    assert quantized(experts, tmp_path / "parts", W4) == whole
    assert all(
        torch.equal(a, b)
        for a, b in zip(*(tensors(tmp_path / n).values() for n in ("whole", "parts")), strict=True)
    )


def test_ignored_modules_stay_as_they_are(llama, tmp_path):
    """Queries stay with keys and values, which are one weight and must have one scheme in vLLM too."""
    recipe = Recipe.of(
        "W4", "rtn", 16, ignore=("k_proj", "model.layers.0.mlp.down_proj", "re:.*layers.1.*gate")
    )
    report = quantized(llama, tmp_path / "out", recipe)
    assert [row.name.removesuffix(".weight") for row in report.weights] == [
        *("layers.0.attention.out", "layers.0.mlp.up", "layers.1.attention.out", "layers.1.mlp.down")
    ]
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    names = {f"model.layers.{i}.self_attn.{which}_proj" for i in (0, 1) for which in "qkv"}
    names |= {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"}
    assert set(config["ignore"]) == names | {"lm_head", "embed_out"}
    with BlockModel.opened(str(llama), torch.device("cpu")) as model:
        whole = torch.empty(4, 3, 8, 32)
        model.source.read([Part.whole(Key("layers.0.attention.qkv.weight"), whole)])
    assert torch.equal(
        tensors(tmp_path / "out")["model.layers.0.self_attn.q_proj.weight"], whole[:, 0].flatten(0, 1)
    )


def test_tables_keep_their_rows_where_the_head_shares_them(gpt2, tmp_path):
    quantized(gpt2, tmp_path / "out", Recipe.of("W4", "rtn", 16))
    with BlockModel.opened(str(gpt2), torch.device("cpu")) as model:
        words = torch.empty(65, 32)
        model.source.read([Part.whole(Key("embedding.word.weight"), words)])
    assert torch.equal(tensors(tmp_path / "out")["model.decoder.embed_tokens.weight"], words)
    # GPT-2's own class has transposed weights, and the same model is an OPT.
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["OPTForCausalLM"]


def test_what_is_loaded_from_the_folder_is_what_was_measured(llama, tmp_path):
    quantized(llama, tmp_path / "out", Recipe.of("W4", "awq", 16, torch.bfloat16))
    stored = tensors(tmp_path / "out")
    assert {t.dtype for name, t in stored.items() if "weight_" not in name} == {torch.bfloat16}
    codes = stored["model.layers.0.mlp.down_proj.weight_packed"]
    assert (codes.dtype, codes.shape) == (torch.int32, (32, 6))
    with HFReader(tmp_path / "out") as reader:
        down = reader.tensor(Key("layers.0.mlp.down.weight"))
    assert down.dtype == torch.bfloat16
    assert len(down[0, :16].unique()) <= 16


@over_table(
    ("scheme", "method", "group", "more", "says"),
    [
        ("W8A8", "rtn", 32, {}, "`--group-size` must be 0 with W8A8"),
        ("W4", "rtn", -1, {}, "`--group-size` must be 0 or at least 2, but is -1"),
        ("W4", "smoothquant", None, {}, "`--method` must be rtn, gptq or awq with W4"),
        ("W4", "gptq", None, {"gptq": Gptq(damping=0.0)}, "`--damping` must be above 0"),
        ("W8A8", "smoothquant", None, {"strength": 1.5}, "`--smoothing-strength` must be from 0 to 1"),
        ("W4", "rtn", None, {"ignore": ("re:(",)}, "`--ignore` must be a regular expression"),
    ],
)
def test_recipes_that_are_none(scheme, method, group, more, says):
    with pytest.raises(ConfigError, match=says):
        Recipe.of(scheme, method, group, **more)


def test_models_that_cannot_be_quantized(llama, tmp_path):
    with pytest.raises(
        ConfigError, match=r"must divide the inputs of each weight, but is 32, and layers.0.mlp.down"
    ):
        quantized(llama, tmp_path / "a", Recipe.of("W4", "rtn", 32))
    with pytest.raises(ConfigError, match="must leave weights to quantize"):
        quantized(llama, tmp_path / "a", Recipe.of("W4", "rtn", 16, ignore=("re:.*",)))
    with (
        BlockModel.opened(str(llama), torch.device("cpu")) as model,
        pytest.raises(ConfigError, match="`--calibrate` must give gptq samples"),
    ):
        quantize(model, W4, (None, None), tmp_path / "a", solo_context())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(CheckpointError, match="must be new or an empty folder"):
        quantized(llama, tmp_path / "full", W4)
    with (
        pytest.raises(ConfigError, match="`--seq-length` must be from 1 to the model's 16, but is 17"),
        BlockModel.opened(str(llama), torch.device("cpu"), 17),
    ):
        pass
    assert not (tmp_path / "a").exists()


def test_a_model_is_not_quantized_twice(llama, tmp_path):
    quantized(llama, tmp_path / "once", Recipe.of("W8", "rtn"))
    with (
        BlockModel.opened(str(tmp_path / "once"), torch.device("cpu")) as model,
        pytest.raises(ConfigError, match="must be in full precision, but has weights of 8 bits already"),
    ):
        quantize(model, Recipe.of("W4", "rtn", 16), (None, None), tmp_path / "twice", solo_context())
    assert not (tmp_path / "twice").exists()


def test_a_weight_that_is_not_finite_is_refused_by_name(llama, tmp_path, monkeypatch):
    build = BlockModel.block

    def damaged(self, part):
        block = build(self, part)
        if part == 1:
            block.layers[0].mlp.up.weight.data[1, 2, 3] = torch.nan
        return block

    monkeypatch.setattr(BlockModel, "block", damaged)
    with pytest.raises(NumericsError, match=r"`layers.1.mlp.up.weight` must be finite"):
        quantized(llama, tmp_path / "out", Recipe.of("W4", "rtn", 16))
    assert not (tmp_path / "out").exists()


@over_table(
    ("name", "scheme", "says"),
    [
        ("falcon", "W4", "FalconForCausalLM has products of its own"),
        ("mamba2", "W8", "Mamba2ForCausalLM has products of its own"),
        ("gpt-oss", "W4", "GptOssForCausalLM stores model.layers.0.mlp.experts.gate_up_proj otherwise"),
        ("qwen3-moe", "W8A8", "Qwen3MoeForCausalLM reads experts only if they are packed"),
    ],
)
def test_what_transformers_would_not_load_is_refused(name, scheme, says, tmp_path):
    pytest.importorskip("transformers")
    SAMPLES[name].build().save_pretrained(tmp_path / name)
    with (
        BlockModel.opened(str(tmp_path / name), torch.device("cpu")) as model,
        pytest.raises(CheckpointError, match=says),
    ):
        Layout.of(model, Recipe.of(scheme, "rtn", 0))


def test_the_commands(runs, tmp_path, capsys):
    trained = train(
        runs / "bytes", f"{LLAMA} --tokenizer-type ByteLevelTokenizer --vocab-size 320 --train-iters 2"
    )
    capsys.readouterr()
    flags = ["--scheme", "W4", "--group-size", "16", "--calibrate", str(runs / "text"), "--split", "90,10,0"]
    out = tmp_path / "out"
    assert main([str(trained), *flags, "--calibrate-samples", "4", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("layer 0: attention.qkv ")
    assert printed.endswith(f"written to {out}\n")
    assert main([str(trained), *flags, "--out", str(out)]) == 1
    capsys.readouterr()
    asked = ["--prompt", "abc", "--max-new-tokens", "4", "--greedy", "--tokenizer-type", "ByteLevelTokenizer"]
    assert generate(["--load", str(out), *asked]) == 0
    assert capsys.readouterr().out.startswith("abc")
    assert math.isfinite(json.loads((out / "quantization_report.json").read_text())["losses"][1])
