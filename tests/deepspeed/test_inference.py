"""`init_inference`: types, checkpoints, our operators, models of our own, and what is refused."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

from megazero.deepspeed.initialize import initialize
from megazero.deepspeed.legacy.inference.config import DeepSpeedInferenceConfig
from megazero.deepspeed.legacy.inference.fused import FusedGelu, FusedRmsNorm
from megazero.deepspeed.legacy.inference.initialize import Int8Rows, init_inference
from megazero.errors import CheckpointError, ConfigError, DataError, MegazeroError
from megazero.inference.generate import generate
from megazero.inference.sampling import Sampling
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from tests.deepspeed.tiny_models import inputs, prompts, tiny
from tests.inference.samples import LLAMA, PROMPTS, build
from tests.tables import over_table


def memory(module: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in [*module.parameters(), *module.buffers()])


def test_int8_rounds_each_row_to_its_largest_weight():
    """DeepSpeed's own int8 fails on every device, though its tutorials name it."""
    weight = torch.tensor([[127.0, -63.6, 0.4], [2.54, 0.0, -1.27]])
    rounded, scale = Int8Rows(torch.float32, 1).right_inverse(weight)
    assert rounded.tolist() == [[127, -64, 0], [127, 0, -64]]
    torch.testing.assert_close(scale.flatten(), torch.tensor([1.0, 0.02]))
    assert Int8Rows(torch.float32, 1)(rounded, scale)[0].tolist() == [127.0, -64.0, 0.0]


def test_int8_takes_half_the_memory_of_16_bits_and_about_the_same_logits():
    model = tiny("llama", 16, 16, intermediate_size=256)
    batch = inputs(model)
    wanted = model(**batch).logits
    half = init_inference(copy.deepcopy(model), dtype="bf16")
    rounded = init_inference(half.module, dtype="int8", quant={"weight": {"q_groups": 4}})
    full = memory(init_inference(copy.deepcopy(model), dtype="bf16").module)
    layers = sum(p.numel() for n, p in model.named_parameters() if "proj" in n)
    assert full - memory(rounded.module) == pytest.approx(
        layers, rel=0.3
    )  # a byte for each weight, less scales
    assert float((rounded(**batch).logits - wanted).norm() / wanted.norm()) < 0.05


def test_a_half_type_leaves_rotary_tables_in_fp32():
    module = init_inference(tiny("llama"), dtype="bf16").module
    assert module.model.rotary_emb.inv_freq.dtype == torch.float32
    assert {param.dtype for param in module.parameters()} == {torch.bfloat16}


@over_table(
    ("kind", "replaced"),
    [
        ("llama", {"FusedRmsNorm": 5}),
        ("gpt2", {"FusedLayerNorm": 5, "FusedGelu": 2}),
        ("gemma", {"FusedGelu": 2}),
    ],
)
def test_operators_of_ours_replace_only_what_they_equal(kind, replaced):
    model = tiny(kind)
    wanted = model(**inputs(model)).logits
    engine = init_inference(model, dtype="fp32", replace_with_kernel_inject=True)
    assert engine.injected == replaced  # a norm of Gemma's adds one to its weight
    torch.testing.assert_close(engine(**inputs(model)).logits, wanted, rtol=1e-4, atol=1e-4)


def test_what_replaces_is_ours():
    module = init_inference(tiny("llama"), kernel_inject=True).module
    assert isinstance(module.model.norm, FusedRmsNorm)
    assert isinstance(
        init_inference(tiny("gpt2"), kernel_inject=True).module.transformer.h[0].mlp.act, FusedGelu
    )


@over_table("safe", [True, False])
@over_table("tp", [1, 2])
def test_a_model_without_memory_takes_the_weights_of_a_sharded_folder(tmp_path, safe, tp):
    source = tiny("llama", 6, 3)
    if safe:
        source.save_pretrained(tmp_path, max_shard_size="20KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
        checkpoint = str(tmp_path)
    else:
        half = len(source.state_dict()) // 2
        parts = list(source.state_dict().items())
        for number, part in enumerate((parts[:half], parts[half:])):
            torch.save(dict(part), tmp_path / f"part{number}.bin")
        description = {"type": "ds_model", "checkpoints": ["part0.bin", "part1.bin"], "version": 1.0}
        (tmp_path / "checkpoint.json").write_text(json.dumps(description))
        checkpoint = str(tmp_path / "checkpoint.json")
    wanted = source(**inputs(source)).logits
    with torch.device("meta"):
        models = [type(source)(source.config) for _ in range(tp)]
    world = ThreadWorld(tp, timeout=60.0)

    def work(rank: int) -> torch.Tensor:
        context = thread_context(world, ProcessGrid(tp=tp), rank)
        keys = {"dtype": "fp32", "checkpoint": checkpoint, "tensor_parallel": {"mpu": context}}
        return init_inference(models[rank], **keys)(**inputs(source)).logits

    for found in world.run(work):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_checkpoints_that_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="must be a folder or a file"):
        init_inference(tiny("llama"), checkpoint=str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="must hold weights"):
        init_inference(tiny("llama"), checkpoint=str(tmp_path))
    with pytest.raises(CheckpointError, match="says that it holds slices"):
        init_inference(tiny("llama"), checkpoint={"checkpoints": ["a.bin"], "parallelization": "tp"})
    torch.save({"model.norm.weight": torch.ones(32)}, tmp_path / "one.bin")
    with pytest.raises(CheckpointError, match="lacks 20, such as model.embed_tokens.weight"):
        init_inference(tiny("llama"), checkpoint=str(tmp_path))
    torch.save({"model.norm.weight": torch.ones(31)}, tmp_path / "one.bin")
    with pytest.raises(CheckpointError, match="does not fit the model"):
        init_inference(tiny("llama"), checkpoint=str(tmp_path))
    (tmp_path / "one.bin").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="must be a file of torch.save, but cannot be read"):
        init_inference(tiny("llama"), checkpoint=str(tmp_path))
    with torch.device("meta"), pytest.raises(ConfigError, match="`checkpoint` must be given"):
        init_inference(nn.Linear(2, 2))


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("kind", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_slices_generate_the_tokens_of_the_whole(kind, beams):
    model = tiny(kind, 6, 3)
    words = {"max_new_tokens": 5, "do_sample": False, "num_beams": beams}
    wanted = model.generate(prompts(), **words)
    copies = [copy.deepcopy(model) for _ in range(2)]
    world = ThreadWorld(2, timeout=60.0)

    def work(rank: int) -> torch.Tensor:
        context = thread_context(world, ProcessGrid(tp=2), rank)
        return init_inference(copies[rank], dtype="fp32", tensor_parallel={"mpu": context}).generate(
            prompts(), **words
        )

    assert all(torch.equal(found, wanted) for found in world.run(work))


@over_table(
    ("keys", "says"),
    [
        ({"tp_size": 2}, "`tp_size` must be a key of init_inference"),
        ({"dtype": "fp12"}, "`dtype` must be one of fp32"),
        ({"mp_size": 2, "tp": {"tp_size": 2}}, "`mp_size`, its old name"),
        ({"moe": {"ep_size": 2}}, "`moe.ep_size` must be 1"),
        ({"save_mp_checkpoint_path": "x"}, "slices need no checkpoint"),
        ({"injection_policy": {nn.Linear: "x"}, "kernel_inject": True}, "choose one of them"),
        ({"injection_policy_tuple": ("x",)}, "with the class of the layers"),
        ({"enable_cuda_graph": True, "mp_size": 2}, "`enable_cuda_graph` must be false"),
        ({"dtype": "int8", "quant": {"weight": {"num_bits": 4}}}, "must have 8 bits"),
        ({"tensor_parallel": {"tp_size": 0}}, "`tensor_parallel.tp_size`"),
        ({"tensor_parallel": {"tp_size": 2}}, "`world size` must be a multiple"),
    ],
)
def test_configurations_that_are_refused(keys, says):
    with pytest.raises(ConfigError, match=says):
        init_inference(tiny("llama"), **keys)


def test_a_key_without_effect_is_named():
    with pytest.warns(
        UserWarning, match="`use_triton` of init_inference has no effect here: there are no Triton"
    ):
        init_inference(nn.Linear(2, 2), use_triton=True)
    assert DeepSpeedInferenceConfig(moe_type="residual").moe.type == "residual"


def test_an_engine_times_and_limits():
    engine = init_inference(tiny("llama"), dtype="fp32", max_out_tokens=6)
    with pytest.raises(MegazeroError, match="must follow `profile_model_time`"):
        engine.model_times()
    engine.profile_model_time()
    engine(**inputs(engine.module))
    assert len(engine.model_times()) == 1
    with pytest.raises(DataError, match="at most `max_out_tokens` \\(6\\) tokens, but has 7"):
        engine.generate(prompts())
    engine.destroy()
    with pytest.raises(MegazeroError, match="must follow"):
        engine.model_times()


def test_a_model_of_ours_continues_prompts():
    model = build(LLAMA)
    with pytest.raises(ConfigError, match="must be that of the model"):
        init_inference(model, dtype="bf16")
    engine = init_inference(model)
    added = generate(engine.module, PROMPTS, max_new_tokens=4, sampling=Sampling(greedy=True), eod=7)
    rows = engine.generate(PROMPTS, max_new_tokens=4, eos_token_id=7).tolist()
    for prompt, more, row in zip(PROMPTS, added, rows, strict=True):
        assert row == prompt + more + [7] * (len(row) - len(prompt + more))
    drawn = [
        engine.generate(torch.tensor([[3, 4]]), do_sample=True, seed=seed).tolist() for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(ConfigError, match="sliced when it is built"):
        init_inference(model, tensor_parallel={"mpu": thread_context(ThreadWorld(2), ProcessGrid(tp=2), 0)})


@pytest.mark.parametrize("stage", [0, 3])
def test_the_hybrid_engine_generates_between_steps(stage):
    model = tiny("llama")
    wanted = model.generate(prompts(), max_new_tokens=4, do_sample=False)
    models = [copy.deepcopy(model) for _ in range(2)]
    world = ThreadWorld(2, timeout=60.0)
    config = {
        "train_batch_size": 4,
        "zero_optimization": {"stage": stage},
        "hybrid_engine": {"enabled": True, "max_out_tokens": 8},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    }

    def work(rank: int) -> list[torch.Tensor]:
        context = thread_context(world, ProcessGrid(dp=2), rank)
        engine, *_ = initialize(model=models[rank], config=config, mpu=context)
        engine.train()
        first = engine.generate(prompts(), max_new_tokens=4, do_sample=False)
        assert engine.module.training
        loss = engine(input_ids=prompts(), labels=prompts()).loss
        engine.backward(loss)
        engine.step()
        with pytest.raises(DataError, match="at most `hybrid_engine.max_out_tokens`"):
            engine.generate(prompts(length=9))
        return [first, engine.generate(prompts(), max_new_tokens=4, do_sample=False)]

    (first, second), other = world.run(work)
    assert torch.equal(first, wanted)
    assert not torch.equal(second, wanted)
    assert torch.equal(second, other[1])


@pytest.mark.parametrize(
    ("section", "says"),
    [({"tokens": 3}, "but has tokens"), ({"enabled": True, "inference_tp_size": 2}, "autotp_size")],
)
def test_a_hybrid_section_that_is_refused(section, says):
    with pytest.raises(ConfigError, match=says):
        initialize(model=tiny("llama"), config={"train_batch_size": 1, "hybrid_engine": section})


class CallsPrint:
    def __reduce__(self):
        return print, ("a file has run code",)


def test_files_of_weights_that_cannot_be_read_are_refused_by_name(tmp_path, capfd):
    """They were an UnpicklingError that advises to run the file, and a SafetensorError."""
    torch.save({"w": torch.ones(2), "x": CallsPrint()}, tmp_path / "code.bin")
    torch.save([1, 2], tmp_path / "list.bin")
    (tmp_path / "bad.bin").write_bytes(b"garbage")
    (tmp_path / "bad.safetensors").write_bytes(b"garbage")
    (tmp_path / "bad.json").write_bytes(b'{"checkpoints"')
    index = tmp_path / "folder/pytorch_model.bin.index.json"
    index.parent.mkdir()
    index.write_text('{"weight_map": ["x"]}')
    for name, reason in {
        "code.bin": "names builtins.print, which was not called; if you trust who wrote it",
        "list.bin": "must hold weights",
        "bad.bin": "must be a file of torch.save",
        "bad.safetensors": "must hold weights",
        "bad.json": "must hold a list of files",
        "folder": "must hold an index of weights",
    }.items():
        with pytest.raises(CheckpointError, match=reason) as refusal:
            init_inference(tiny("llama"), checkpoint=str(tmp_path / name))
        assert "weights_only" not in str(refusal.value)
    assert "has run code" not in capfd.readouterr().out
