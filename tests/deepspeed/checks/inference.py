"""`init_inference`: its configuration, types, the engine's members, and generation."""

from __future__ import annotations

import json
import warnings

import torch

from tests.deepspeed.checks import check, outcome
from tests.deepspeed.tiny_models import prompts, tiny


def engine_of(deepspeed, model=None, **kwargs):
    kwargs.setdefault("dtype", torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return deepspeed.init_inference(tiny("llama") if model is None else model, **kwargs)


def settings(deepspeed, **kwargs):
    """What a configuration differs in from the default one."""
    default = deepspeed.DeepSpeedInferenceConfig().dict()
    read = deepspeed.DeepSpeedInferenceConfig(**kwargs).dict()
    return {key: value for key, value in read.items() if value != default[key] and key != "zero"}


def logits(engine):
    with torch.no_grad():
        out = engine(input_ids=prompts()).logits.float()
    return out[0, -1, :6].tolist()


@check()
def the_default_of_every_key(deepspeed, scratch):
    return {key: value for key, value in deepspeed.default_inference_config().items() if key != "zero"}


@check()
def spellings_of_types(deepspeed, scratch):
    names = ["fp16", "half", "fp32", "float", "bf16", "bfloat", "int8", "float16", "torch.bfloat16"]
    given = [*names, torch.half, torch.float32, torch.bfloat16, torch.int8]
    return [deepspeed.DeepSpeedInferenceConfig(dtype=dtype).dict()["dtype"] for dtype in given]


@check()
def a_type_that_is_none(deepspeed, scratch):
    return outcome(lambda: engine_of(deepspeed, dtype="fp12"))


@check()
def other_names_of_keys(deepspeed, scratch):
    return settings(deepspeed, kernel_inject=True, tp={"tp_size": 4}, tm=False, max_tokens=77)


@check()
def other_name_of_the_injection_policy(deepspeed, scratch):
    config = deepspeed.DeepSpeedInferenceConfig(injection_dict={torch.nn.Linear: ("out",)})
    return config.injection_policy == {torch.nn.Linear: ("out",)}


@check()
def other_name_of_the_number_of_experts(deepspeed, scratch):
    return settings(deepspeed, moe={"num_experts": [4, 4]})


@check()
def deprecated_sizes(deepspeed, scratch):
    return settings(deepspeed, mp_size=2, ep_size=4)


@check()
def deprecated_experts(deepspeed, scratch):
    return settings(deepspeed, moe_experts=[8], moe_type="residual")


@check()
def a_deprecated_and_a_present_name(deepspeed, scratch):
    return outcome(lambda: settings(deepspeed, mp_size=2, tensor_parallel={"tp_size": 4}))


@check()
def a_deprecated_name_beside_its_section(deepspeed, scratch):
    return settings(deepspeed, mp_size=2, tensor_parallel={"enabled": True})


@check()
def an_unknown_key(deepspeed, scratch):
    return outcome(lambda: engine_of(deepspeed, tp_size=1))


@check()
def an_unknown_key_of_a_section(deepspeed, scratch):
    return outcome(lambda: engine_of(deepspeed, tensor_parallel={"size": 1}))


@check()
def a_section_of_another_shape(deepspeed, scratch):
    return outcome(lambda: engine_of(deepspeed, tensor_parallel=2))


@check()
def a_number_that_is_text(deepspeed, scratch):
    return outcome(lambda: engine_of(deepspeed, max_out_tokens="many"))


@check()
def a_number_in_text(deepspeed, scratch):
    return settings(deepspeed, max_out_tokens="12")


@check()
def a_kind_of_experts_that_is_none(deepspeed, scratch):
    return outcome(lambda: settings(deepspeed, moe={"type": "shared"}))


@check()
def a_checkpoint_that_is_a_number(deepspeed, scratch):
    return outcome(lambda: settings(deepspeed, checkpoint=3))


@check()
def moe_as_a_switch(deepspeed, scratch):
    return outcome(lambda: settings(deepspeed, moe=True))


@check()
def quantization_sections(deepspeed, scratch):
    return settings(deepspeed, quant={"weight": {"q_groups": 4}, "qkv": {"enabled": False}})


@check()
def quantization_of_an_unknown_kind(deepspeed, scratch):
    return outcome(lambda: settings(deepspeed, quant={"weight": {"q_type": "odd"}}))


@check()
def a_key_in_both_with_one_value(deepspeed, scratch):
    return outcome(lambda: engine_of(deepspeed, config={"max_out_tokens": 9}, max_out_tokens=9))


@check()
def a_key_in_both_with_two_values(deepspeed, scratch):
    return outcome(lambda: engine_of(deepspeed, config={"max_out_tokens": 9}, max_out_tokens=8))


@check()
def the_dictionary_is_updated(deepspeed, scratch):
    config = {"max_out_tokens": 9}
    engine_of(deepspeed, config=config, return_tuple=True)
    return sorted(config)


@check()
def a_path_of_a_json(deepspeed, scratch):
    path = scratch / "inference.json"
    path.write_text(json.dumps({"dtype": "bf16", "max_out_tokens": 31}))
    model = deepspeed.init_inference(tiny("llama"), config=str(path)).module
    return str(next(model.parameters()).dtype)


@check()
def a_configuration_of_another_kind(deepspeed, scratch):
    return outcome(lambda: deepspeed.init_inference(tiny("llama"), config=["fp32"]))


@check(here=["torch.float16"], why="it takes no fp16 on a CPU, where torch computes in it")
def without_a_configuration_weights_are_half(deepspeed, scratch):
    engine = deepspeed.init_inference(tiny("llama"))
    return sorted({str(param.dtype) for param in engine.module.parameters()})


@check(tolerance=1e-4)
def logits_in_fp32(deepspeed, scratch):
    return logits(engine_of(deepspeed))


@check(tolerance=0.03)
def logits_in_bf16(deepspeed, scratch):
    return logits(engine_of(deepspeed, dtype=torch.bfloat16))


@check(
    tolerance=0.03,
    here=[1.66699, 2.46639, -2.58123, 0.52104, -0.06028, -2.12923],
    why="it takes no fp16 on a CPU; these are the logits in fp32",
)
def logits_in_fp16(deepspeed, scratch):
    return logits(engine_of(deepspeed, dtype="half"))


@check(tolerance=1e-4)
def logits_of_other_families(deepspeed, scratch):
    return {kind: logits(engine_of(deepspeed, tiny(kind))) for kind in ("opt", "gpt2", "bloom", "bert")}


@check()
def an_engine_of_a_plain_module(deepspeed, scratch):
    engine = engine_of(deepspeed, torch.nn.Linear(3, 2))
    return [hasattr(engine, "generate"), list(engine(torch.ones(1, 3)).shape)]


@check()
def greedy_tokens(deepspeed, scratch):
    engine = engine_of(deepspeed)
    return engine.generate(prompts(), max_new_tokens=5, do_sample=False).tolist()


@check()
def greedy_tokens_by_keyword(deepspeed, scratch):
    engine = engine_of(deepspeed, tiny("gpt2"))
    kwargs = {"max_new_tokens": 4, "do_sample": False}
    return engine.generate(input_ids=prompts(), attention_mask=torch.ones_like(prompts()), **kwargs).tolist()


@check()
def sampled_tokens_follow_the_seed(deepspeed, scratch):
    engine = engine_of(deepspeed)
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(engine.generate(prompts(), max_new_tokens=5, do_sample=True).tolist())
    return found[0] == found[1]


@check(here="accepted", why="beams are the module's own and are right")
def several_beams(deepspeed, scratch):
    engine = engine_of(deepspeed)
    return outcome(lambda: engine.generate(prompts(), max_new_tokens=3, num_beams=2))


@check(here="refused", why="it looks at prompts that are given by keyword alone")
def a_prompt_that_is_too_long(deepspeed, scratch):
    engine = engine_of(deepspeed, max_out_tokens=4)
    return outcome(lambda: engine.generate(prompts(), max_new_tokens=1))


@check()
def the_module_is_the_model(deepspeed, scratch):
    model = tiny("llama")
    return engine_of(deepspeed, model).module is model


@check(here=[32, True, False], why="attributes of the module can be read through every engine")
def attributes_of_the_module(deepspeed, scratch):
    engine = engine_of(deepspeed)
    return [engine.config.hidden_size, engine.can_generate(), hasattr(engine, "no_such_name")]


@check()
def the_class(deepspeed, scratch):
    return isinstance(engine_of(deepspeed), deepspeed.InferenceEngine)


@check()
def gradients_are_left_to_the_script(deepspeed, scratch):
    return engine_of(deepspeed)(input_ids=prompts()).logits.requires_grad


@check()
def rotary_tables_of_half_weights(deepspeed, scratch):
    engine = engine_of(deepspeed, dtype="fp32")
    return str(engine.module.model.rotary_emb.inv_freq.dtype)


@check()
def measured_times(deepspeed, scratch):
    engine = engine_of(deepspeed)
    engine.profile_model_time()
    for _ in range(3):
        engine(input_ids=prompts())
    times = engine.model_times()
    return [len(times), all(0 < t < 60000 for t in times), len(engine.model_times())]


@check()
def times_that_are_not_measured(deepspeed, scratch):
    engine = engine_of(deepspeed)
    return outcome(engine.model_times)


@check(here="accepted", why="on a CPU it asks for a library that it has not built")
def destroyed(deepspeed, scratch):
    engine = engine_of(deepspeed)
    return outcome(engine.destroy)


@check(here="accepted", why="weights are rounded and made floating in each product; its own int8 is dead")
def eight_bits(deepspeed, scratch):
    return outcome(lambda: engine_of(deepspeed, dtype=torch.int8)(input_ids=prompts()))


@check()
def a_policy_beside_kernels(deepspeed, scratch):
    model = tiny("bert")
    policy = {type(model.bert.encoder.layer[0]): ("output.dense",)}
    return outcome(
        lambda: engine_of(deepspeed, model, injection_policy=policy, replace_with_kernel_inject=True)
    )


@check(tolerance=1e-4)
def a_policy_on_one_rank(deepspeed, scratch):
    model = tiny("bert")
    policy = {type(model.bert.encoder.layer[0]): ("output.dense",)}
    return logits(engine_of(deepspeed, model, injection_policy=policy))


@check()
def keys_that_change_no_numbers(deepspeed, scratch):
    keys = {"return_tuple": False, "triangular_masking": False, "min_out_tokens": 2, "transposed_mode": True}
    with_keys, without = engine_of(deepspeed, **keys), engine_of(deepspeed)
    return logits(with_keys) == logits(without)


@check()
def mode_for_training_and_inference(deepspeed, scratch):
    return [deepspeed.set_autotp_mode(training=True), deepspeed.set_autotp_mode(training=False)]


@check()
def a_model_that_is_none(deepspeed, scratch):
    return outcome(lambda: engine_of(deepspeed, "llama"))


@check(
    here={"same": True, "kept": "torch.float32"},
    why="its checkpoints need kernels for their families",
    tolerance=1e-4,
)
def weights_from_a_folder(deepspeed, scratch):
    tiny("llama").save_pretrained(scratch / "folder")
    other = tiny("llama", seed=9)
    engine = engine_of(deepspeed, other, checkpoint=str(scratch / "folder"))
    return {
        "same": logits(engine) == logits(engine_of(deepspeed)),
        "kept": str(next(engine.module.parameters()).dtype),
    }
