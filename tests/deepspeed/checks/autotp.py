"""Two tensor-parallel ranks: `init_inference` with `tp_size`, and training with `autotp_size`."""

from __future__ import annotations

import warnings

import torch

from tests.deepspeed.checks import check, outcome
from tests.deepspeed.tiny_models import inputs, prompts, tiny


def error(deepspeed, kind, heads=4, key_value=2, **keys):
    """How far the logits of a sliced model are from those of the whole one: "right" below 1e-4."""
    whole = tiny(kind, heads, key_value, **keys)
    batch = inputs(whole)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = whole(**batch).logits
        sliced = tiny(kind, heads, key_value, **keys)
        engine = deepspeed.init_inference(sliced, dtype=torch.float32, tensor_parallel={"tp_size": 2})
        found = engine(**batch).logits
    return "right" if float((found - wanted).abs().max() / wanted.abs().max()) < 1e-4 else "wrong"


def config(stage=0, **keys):
    return {
        "train_batch_size": 4,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "tensor_parallel": {"autotp_size": 2},
        **keys,
    }


def train(engine, steps=3):
    found = []
    for number in range(steps):
        tokens = prompts(4, seed=number)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        found.append(float(loss.detach()))
    return found


def engine_of(deepspeed, model, **keys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return deepspeed.initialize(model=model, config=config(**keys), model_parameters=model.parameters())[
            0
        ]


@check(ranks=2)
def llama(deepspeed, scratch):
    return error(deepspeed, "llama")


@check(ranks=2)
def mistral_and_qwen2(deepspeed, scratch):
    return [error(deepspeed, kind) for kind in ("mistral", "qwen2")]


@check(ranks=2)
def qwen3(deepspeed, scratch):
    return error(deepspeed, "qwen3")


@check(ranks=2)
def gemma(deepspeed, scratch):
    return error(deepspeed, "gemma")


@check(ranks=2)
def opt(deepspeed, scratch):
    return error(deepspeed, "opt")


@check(ranks=2)
def bloom(deepspeed, scratch):
    return error(deepspeed, "bloom")


@check(ranks=2)
def gpt_neox(deepspeed, scratch):
    return error(deepspeed, "gpt_neox")


@check(ranks=2)
def gptj(deepspeed, scratch):
    return error(deepspeed, "gptj")


@check(ranks=2)
def gpt_neo(deepspeed, scratch):
    return error(deepspeed, "gpt_neo")


@check(ranks=2, here="right", why="it takes its layout for another")
def falcon_of_many_queries(deepspeed, scratch):
    return error(deepspeed, "falcon", multi_query=True)


@check(ranks=2, here="right", why="it leaves the bias of all heads")
def falcon_with_alibi(deepspeed, scratch):
    return error(deepspeed, "falcon", multi_query=False, alibi=True)


@check(ranks=2)
def phi(deepspeed, scratch):
    return error(deepspeed, "phi")


@check(ranks=2, here="right", why="it slices the halves and not the sizes")
def phi3(deepspeed, scratch):
    return error(deepspeed, "phi3")


@check(ranks=2)
def mixtral(deepspeed, scratch):
    return error(deepspeed, "mixtral")


@check(ranks=2)
def bert(deepspeed, scratch):
    return error(deepspeed, "bert")


@check(ranks=2)
def t5(deepspeed, scratch):
    return error(deepspeed, "t5")


@check(ranks=2)
def mpt(deepspeed, scratch):
    return error(deepspeed, "mpt")


@check(ranks=2)
def starcoder(deepspeed, scratch):
    return error(deepspeed, "gpt_bigcode", multi_query=True)


@check(ranks=2, here="right", why="the thirds of its fused weight are sliced one by one")
def gpt2(deepspeed, scratch):
    return error(deepspeed, "gpt2")


@check(ranks=2)
def three_key_value_heads(deepspeed, scratch):
    return error(deepspeed, "llama", 6, 3)


@check(ranks=2)
def three_heads(deepspeed, scratch):
    return error(deepspeed, "llama", 3, 3)


@check(ranks=2)
def one_key_value_head(deepspeed, scratch):
    return error(deepspeed, "llama", 4, 1)


@check(ranks=2, here="refused", why="the order in its fused weight is unknown, so it is refused by name")
def an_unknown_fused_layout(deepspeed, scratch):
    return outcome(lambda: error(deepspeed, "codegen", rotary_dim=4))


@check(ranks=2, here=["right", "right"], why="the row of the family decides")
def an_injection_policy(deepspeed, scratch):
    found = []
    for kind, names in (("bert", ("attention.output.dense", "output.dense")), ("opt", ("out_proj", "fc2"))):
        whole, sliced = tiny(kind), tiny(kind)
        block = (sliced.bert.encoder.layer if kind == "bert" else sliced.model.decoder.layers)[0]
        policy = {type(block): names}
        batch = inputs(whole)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine = deepspeed.init_inference(sliced, dtype=torch.float32, mp_size=2, injection_policy=policy)
            far = (engine(**batch).logits - whole(**batch).logits).abs().max()
        found.append("right" if float(far) < 1e-3 else "wrong")
    return found


@check(ranks=2)
def greedy_tokens(deepspeed, scratch):
    engine = deepspeed.init_inference(tiny("llama"), dtype=torch.float32, tensor_parallel={"tp_size": 2})
    return engine.generate(prompts(), max_new_tokens=5, do_sample=False).tolist()


@check(ranks=2)
def ranks_draw_the_same_tokens(deepspeed, scratch):
    torch.manual_seed(int(torch.distributed.get_rank()))
    engine = deepspeed.init_inference(tiny("llama"), dtype=torch.float32, tensor_parallel={"tp_size": 2})
    tokens = engine.generate(prompts(), max_new_tokens=5, do_sample=True)
    other = tokens.clone()
    torch.distributed.broadcast(other, 1)
    return torch.equal(tokens, other)


@check(ranks=2)
def a_graph_of_slices(deepspeed, scratch):
    keys = {"dtype": torch.float32, "enable_cuda_graph": True, "tensor_parallel": {"tp_size": 2}}
    return outcome(lambda: deepspeed.init_inference(tiny("llama"), **keys)(input_ids=prompts()))


@check(ranks=2, here="refused", why="two ranks cannot hold four slices")
def more_slices_than_ranks(deepspeed, scratch):
    keys = {"dtype": torch.float32, "tensor_parallel": {"tp_size": 4}}
    return outcome(lambda: deepspeed.init_inference(tiny("llama"), **keys))


@check(ranks=2)
def width_of_a_slice(deepspeed, scratch):
    engine = deepspeed.init_inference(tiny("llama"), dtype=torch.float32, tensor_parallel={"tp_size": 2})
    attention = engine.module.model.layers[0].self_attn
    return [list(attention.q_proj.weight.shape), list(attention.o_proj.weight.shape)]


@check(ranks=2, tolerance=1e-5)
def losses_at_stage_0(deepspeed, scratch):
    return train(engine_of(deepspeed, tiny("llama")))


@check(ranks=2, tolerance=1e-5)
def losses_at_stage_1(deepspeed, scratch):
    return train(engine_of(deepspeed, tiny("llama"), stage=1))


@check(ranks=2, tolerance=1e-5)
def losses_at_stage_2(deepspeed, scratch):
    return train(engine_of(deepspeed, tiny("llama"), stage=2))


@check(ranks=2, tolerance=1e-5)
def losses_at_stage_3(deepspeed, scratch):
    return train(engine_of(deepspeed, tiny("llama"), stage=3))


@check(ranks=2, tolerance=1e-5)
def losses_of_qwen3(deepspeed, scratch):
    return train(engine_of(deepspeed, tiny("qwen3")))


@check(ranks=2, tolerance=1e-5)
def losses_with_three_key_value_heads(deepspeed, scratch):
    return train(engine_of(deepspeed, tiny("llama", 6, 3)))


@check(ranks=2, tolerance=1e-5)
def norm_of_the_gradients(deepspeed, scratch):
    engine = engine_of(deepspeed, tiny("llama"), stage=1)
    train(engine, 1)
    return float(engine.get_global_grad_norm())


@check(ranks=2, tolerance=1e-5)
def losses_with_a_preset(deepspeed, scratch):
    keys = {"tensor_parallel": {"autotp_size": 2, "preset_model": "llama"}}
    return train(engine_of(deepspeed, tiny("llama"), **keys))


@check(ranks=2, here="refused", why="it takes its default rules instead, without a word")
def a_preset_that_is_none(deepspeed, scratch):
    keys = {"tensor_parallel": {"autotp_size": 2, "preset_model": "lama"}}
    return outcome(lambda: engine_of(deepspeed, tiny("llama"), **keys))


@check(ranks=2)
def an_unknown_key_of_the_section(deepspeed, scratch):
    keys = {"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 2}, "autotp": True}}
    return outcome(lambda: engine_of(deepspeed, tiny("llama"), **keys))


class Perceptron(torch.nn.Module):
    """Two layers, and the mean square of what they make of random numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.config = type("Config", (), {"model_type": "perceptron"})()
        self.up, self.down = torch.nn.Linear(6, 8), torch.nn.Linear(8, 6)

    def forward(self, input_ids, labels):
        x = torch.nn.functional.one_hot(input_ids[:, :3] % 6, 6).float()
        return type("Out", (), {"loss": self.down(torch.relu(self.up(x))).square().mean()})()


SPECS = [
    {"patterns": [".*up\\.weight$"], "partition_type": "column"},
    {"patterns": [".*down\\.weight$"], "partition_type": "row"},
]


@check(ranks=2, tolerance=1e-5)
def losses_with_specs_of_layers(deepspeed, scratch):
    section = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": SPECS}}
    return train(engine_of(deepspeed, Perceptron(), tensor_parallel=section))


@check(ranks=2)
def specs_with_a_wrong_kind(deepspeed, scratch):
    specs = [{"patterns": [".*up"], "partition_type": "diagonal"}]
    section = {"autotp_size": 2, "partition_config": {"layer_specs": specs}}
    return outcome(lambda: engine_of(deepspeed, Perceptron(), tensor_parallel=section))


@check(ranks=2, tolerance=1e-5)
def specs_that_skip(deepspeed, scratch):
    specs = [{"patterns": [".*"], "partition_type": "skip"}]
    section = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": specs}}
    return train(engine_of(deepspeed, Perceptron(), tensor_parallel=section))


@check(ranks=2)
def batches_that_differ(deepspeed, scratch):
    engine = engine_of(deepspeed, tiny("llama"))
    tokens = prompts(4, seed=torch.distributed.get_rank())
    return outcome(lambda: engine(input_ids=tokens, labels=tokens))


@check(ranks=2)
def whole_weights_in_16_bits(deepspeed, scratch):
    engine = engine_of(deepspeed, tiny("llama"))
    state = engine._consolidated_16bit_state_dict()
    return {name: list(value.shape) for name, value in state.items()} if state else {}


@check(ranks=2)
def slices_in_a_checkpoint(deepspeed, scratch):
    engine = engine_of(deepspeed, tiny("llama"), stage=1)
    train(engine, 1)
    engine.save_checkpoint(str(scratch / "checkpoint"))
    after = train(engine, 1)
    engine.load_checkpoint(str(scratch / "checkpoint"))
    return abs(train(engine, 1)[0] - after[0]) < 1e-5


@check(ranks=2)
def the_size(deepspeed, scratch):
    return engine_of(deepspeed, tiny("llama")).autotp_size()


@check(ranks=2)
def a_batch_of_one_replica(deepspeed, scratch):
    engine = engine_of(deepspeed, tiny("llama"))
    return [engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()]


@check(ranks=2)
def a_model_that_is_to_be_sliced_later(deepspeed, scratch):
    model = tiny("llama")
    same = deepspeed.tp_model_init(model, tp_size=2, dtype=torch.float32) is model
    return [same, list(model.model.layers[0].self_attn.q_proj.weight.shape)]


@check(ranks=2, tolerance=1e-5)
def losses_after_tp_model_init(deepspeed, scratch):
    model = deepspeed.tp_model_init(tiny("llama"), tp_size=2, dtype=torch.float32)
    return train(engine_of(deepspeed, model))


@check(ranks=2)
def tp_model_init_with_another_size(deepspeed, scratch):
    model = tiny("llama")
    deepspeed.tp_model_init(model, tp_size=2, dtype=torch.float32)
    return outcome(lambda: deepspeed.tp_model_init(model, tp_size=1, dtype=torch.float32))


@check(ranks=2)
def tp_model_init_against_the_json(deepspeed, scratch):
    model = deepspeed.tp_model_init(tiny("llama"), tp_size=2, dtype=torch.float32)
    return outcome(
        lambda: engine_of(deepspeed, model, tensor_parallel={"autotp_size": 1, "tp": {"tp_size": 1}})
    )


@check(ranks=2)
def tp_model_init_in_another_type(deepspeed, scratch):
    model = deepspeed.tp_model_init(tiny("llama"), tp_size=2, dtype=torch.float32)
    return outcome(lambda: engine_of(deepspeed, model, bf16={"enabled": True}))
