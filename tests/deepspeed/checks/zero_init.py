"""`zero.Init`, what it leaves of a model, and what a script reads of its parameters."""

from __future__ import annotations

import torch
from torch import nn

from tests.deepspeed.checks import check, outcome

CONFIG = {
    "train_batch_size": 2,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
}
FULL_SHAPE = "a sharded parameter keeps its shape, so that code which only asks for sizes needs no gather"
OWN_TYPE = "weights keep the type that they are built in unless the configuration or `dtype` names another"


def names(dtype):
    return str(dtype).removeprefix("torch.")


def whole(deepspeed, param):
    with deepspeed.zero.GatheredParameters(param):
        return param.detach().float().flatten().tolist()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.arange(5.0))
        self.register_buffer("rotary", 1.0 / (10000.0 ** (torch.arange(0, 6, 2).float() / 6)))
        self.register_buffer("positions", torch.arange(7))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).mean() + self.scale.mean()


@check()
def every_parameter_is_of_zero(deepspeed, scratch):
    with deepspeed.zero.Init():
        model = Net()
    return {name: hasattr(param, "ds_id") for name, param in model.named_parameters()}


@check()
def a_lone_layer_is_sharded(deepspeed, scratch):
    with deepspeed.zero.Init():
        layer = nn.Linear(4, 3)
    return [hasattr(layer.weight, "ds_id"), layer.weight.ds_numel, list(layer.weight.ds_shape)]


@check()
def nothing_is_sharded_after_the_context(deepspeed, scratch):
    with deepspeed.zero.Init():
        nn.Linear(2, 2)
    return hasattr(nn.Linear(2, 2).weight, "ds_id")


@check()
def disabled_changes_nothing(deepspeed, scratch):
    with deepspeed.zero.Init(enabled=False):
        layer = nn.Linear(4, 3)
    return [hasattr(layer.weight, "ds_id"), list(layer.weight.shape)]


@check()
def the_shape_is_remembered(deepspeed, scratch):
    with deepspeed.zero.Init():
        model = Net()
    return {name: [list(p.ds_shape), p.ds_numel] for name, p in model.named_parameters()}


@check(here=[[3, 4], 12], why=FULL_SHAPE)
def the_shape_between_uses(deepspeed, scratch):
    with deepspeed.zero.Init():
        model = Net()
    return [list(model.first.weight.shape), model.first.weight.numel()]


@check()
def the_shape_within_a_gather(deepspeed, scratch):
    with deepspeed.zero.Init():
        model = Net()
    with deepspeed.zero.GatheredParameters(model.first.weight):
        return list(model.first.weight.shape)


@check()
def the_status_changes_with_a_gather(deepspeed, scratch):
    with deepspeed.zero.Init():
        model = Net()
    param = model.first.weight
    found = [param.ds_status.name]
    with deepspeed.zero.GatheredParameters(param):
        found.append(param.ds_status.name)
    return [*found, param.ds_status.name]


@check()
def the_kinds_of_status(deepspeed, scratch):
    status, kind = deepspeed.zero.ZeroParamStatus, deepspeed.zero.ZeroParamType
    return [[s.name, s.value] for s in status] + [[k.name, k.value] for k in kind]


@check()
def the_type_of_a_sharded_parameter(deepspeed, scratch):
    with deepspeed.zero.Init():
        layer = nn.Linear(2, 2)
    return layer.weight.ds_param_type.name


@check()
def numbers_are_all_different(deepspeed, scratch):
    with deepspeed.zero.Init():
        model = Net()
    return len({param.ds_id for param in model.parameters()})


@check(ranks=2)
def numbers_grow_in_the_order_of_building(deepspeed, scratch):
    with deepspeed.zero.Init():
        one, two = nn.Linear(2, 2), nn.Linear(2, 2)
        three = nn.Sequential(one, two)
    return len({p.ds_id for p in three.parameters()})


@check()
def the_slice_of_one_rank_is_everything(deepspeed, scratch):
    with deepspeed.zero.Init(dtype=torch.bfloat16):
        layer = nn.Linear(4, 3)
    return [layer.weight.ds_tensor.numel(), layer.weight.partition_numel()]


@check(ranks=2)
def the_slice_of_one_of_two_ranks(deepspeed, scratch):
    with deepspeed.zero.Init(dtype=torch.bfloat16):
        layer = nn.Linear(5, 3)
    return {
        "rank": layer.weight.ds_zero_partition_rank,
        "ranks": layer.weight.ds_zero_partition_world_size,
        "weight": layer.weight.ds_tensor.numel(),
        "bias": layer.bias.ds_tensor.numel(),
        "kept": layer.bias.partition_numel(),
        "padding": layer.bias.padding_size(),
    }


@check()
def attributes_that_scripts_read(deepspeed, scratch):
    with deepspeed.zero.Init():
        layer = nn.Linear(4, 3)
    wanted = "ds_persist ds_process_group ds_active_sub_modules ds_secondary_tensor is_external_param"
    wanted += " all_gather partition partition_numel padding_size ds_summary ds_zero_partition_rank"
    return {name: hasattr(layer.weight, name) for name in wanted.split()}


@check()
def the_keys_of_a_summary(deepspeed, scratch):
    with deepspeed.zero.Init():
        layer = nn.Linear(4, 3)
    summary = layer.weight.ds_summary()
    keys = ("status", "ds_numel", "ds_shape", "requires_grad", "persist")
    return [
        sorted(set(keys) & set(summary)),
        summary["status"],
        summary["ds_numel"],
        list(summary["ds_shape"]),
    ]


@check()
def gather_and_partition_by_hand(deepspeed, scratch):
    with deepspeed.zero.Init(dtype=torch.bfloat16):
        layer = nn.Linear(4, 3)
    param = layer.weight
    param.all_gather()
    found = [param.ds_status.name, list(param.shape)]
    param.data.fill_(2.0)
    param.partition(has_been_updated=True)
    found.append(param.ds_status.name)
    param.all_gather()
    found.append(param.detach().float().sum().item())
    param.partition()
    return found


@check()
def a_partition_without_an_update_drops_it(deepspeed, scratch):
    with deepspeed.zero.Init(dtype=torch.bfloat16):
        layer = nn.Linear(2, 2)
    with deepspeed.zero.GatheredParameters(layer.weight, modifier_rank=0), torch.no_grad():
        layer.weight.fill_(1.0)
    layer.weight.all_gather()
    layer.weight.data.fill_(2.0)
    layer.weight.partition()
    return whole(deepspeed, layer.weight)


@check(ranks=2)
def several_are_gathered_by_hand(deepspeed, scratch):
    with deepspeed.zero.Init(dtype=torch.bfloat16):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    params = list(model.parameters())
    params[0].all_gather(param_list=params)
    found = [param.ds_status.name for param in params]
    params[0].partition(param_list=params)
    return found + [param.ds_status.name for param in params]


@check(here="float32", why=OWN_TYPE)
def the_type_without_a_configuration(deepspeed, scratch):
    with deepspeed.zero.Init():
        layer = nn.Linear(2, 2)
    return names(layer.weight.dtype)


@check(here="float32", why="DeepSpeed makes bf16 of an explicit fp32 where the device lacks fp16 (a slip)")
def fp32_by_argument(deepspeed, scratch):
    with deepspeed.zero.Init(dtype=torch.float32):
        layer = nn.Linear(2, 2)
    return names(layer.weight.dtype)


@check()
def bf16_by_argument(deepspeed, scratch):
    with deepspeed.zero.Init(dtype=torch.bfloat16):
        layer = nn.Linear(2, 2)
    return names(layer.weight.dtype)


@check()
def bf16_by_configuration(deepspeed, scratch):
    with deepspeed.zero.Init(config_dict_or_path={**CONFIG, "bf16": {"enabled": True}}):
        layer = nn.Linear(2, 2)
    return names(layer.weight.dtype)


@check()
def fp32_by_configuration(deepspeed, scratch):
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        layer = nn.Linear(2, 2)
    return names(layer.weight.dtype)


@check()
def the_older_name_of_the_configuration(deepspeed, scratch):
    with deepspeed.zero.Init(config={**CONFIG, "bf16": {"enabled": True}}):
        layer = nn.Linear(2, 2)
    return names(layer.weight.dtype)


@check()
def arguments_by_position(deepspeed, scratch):
    with deepspeed.zero.Init(None, None, True, None, False, CONFIG, None, False, None, None):
        layer = nn.Linear(2, 2)
    return hasattr(layer.weight, "ds_id")


@check()
def every_argument_by_name(deepspeed, scratch):
    context = deepspeed.zero.Init(
        module=None,
        data_parallel_group=None,
        mem_efficient_linear=False,
        remote_device="cpu",
        pin_memory=False,
        config_dict_or_path=CONFIG,
        enabled=True,
        dtype=None,
        mpu=None,
        zero_param_parallel_group=None,
        zero_quantized_weights=False,
        zero_quantized_nontrainable_weights=False,
        sequence_data_parallel_group=None,
        param_swapper=None,
    )
    with context:
        layer = nn.Linear(3, 2)
    return [hasattr(layer.weight, "ds_id"), layer.weight.ds_tensor.device.type]


@check()
def slices_on_the_host(deepspeed, scratch):
    with deepspeed.zero.Init(remote_device="cpu", dtype=torch.bfloat16):
        layer = nn.Linear(3, 2)
    with deepspeed.zero.GatheredParameters(layer.weight, modifier_rank=0), torch.no_grad():
        layer.weight.fill_(0.5)
    return whole(deepspeed, layer.weight)


@check()
def two_names_of_one_group(deepspeed, scratch):
    group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else object()
    return outcome(lambda: deepspeed.zero.Init(data_parallel_group=group, sequence_data_parallel_group=group))


@check()
def a_finished_module(deepspeed, scratch):
    model = Net()
    deepspeed.zero.Init(module=model)
    return [hasattr(p, "ds_id") for p in model.parameters()]


@check(tolerance=1e-6)
def a_finished_module_keeps_its_values(deepspeed, scratch):
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(6.0).view(2, 3))
    deepspeed.zero.Init(module=layer, config_dict_or_path=CONFIG)
    return whole(deepspeed, layer.weight)


@check(ranks=2)
def the_first_ranks_values_count(deepspeed, scratch):
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        layer = nn.Linear(3, 2)
    mine = whole(deepspeed, layer.weight)
    total = torch.tensor(mine)
    torch.distributed.all_reduce(total)
    return (total / 2 - torch.tensor(mine)).abs().max().item()


@check()
def buffers_stay(deepspeed, scratch):
    plain = Net()
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = Net()
    return {
        name: [names(b.dtype), torch.equal(b, dict(plain.named_buffers())[name])]
        for name, b in model.named_buffers()
    }


@check()
def rotary_tables_in_bf16(deepspeed, scratch):
    plain = Net()
    with deepspeed.zero.Init(config_dict_or_path={**CONFIG, "bf16": {"enabled": True}}):
        model = Net()
    return {
        name: [names(b.dtype), torch.equal(b.float(), dict(plain.named_buffers())[name].float())]
        for name, b in model.named_buffers()
    }


@check()
def functions_of_torch_are_themselves_afterwards(deepspeed, scratch):
    linear, apply = nn.functional.linear, nn.Module.apply
    with deepspeed.zero.Init():
        nn.Linear(2, 2)
    found = [nn.functional.linear is linear, nn.Module.apply is apply]
    nn.functional.linear = linear
    return found


@check(here=True, why="DeepSpeed's `apply` gives None within the context")
def apply_gives_the_module(deepspeed, scratch):
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        layer = nn.Sequential(nn.Linear(2, 2))
        return layer.apply(lambda module: None) is layer


@check()
def apply_writes_whole_weights(deepspeed, scratch):
    def fill(module):
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.fill_(0.5)

    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        model.apply(fill)
    return whole(deepspeed, model[0].weight) + whole(deepspeed, model[1].weight)


@check(
    here=[0.25] * 6, why="a constructor may go on writing to its layers; DeepSpeed drops that without a word"
)
def a_constructor_writes_to_its_layers(deepspeed, scratch):
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
            nn.init.constant_(self.layer.weight, 0.25)

    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = Written()
    return whole(deepspeed, model.layer.weight)


@check()
def contexts_within_contexts(deepspeed, scratch):
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        with deepspeed.zero.Init(config_dict_or_path=CONFIG):
            inner = nn.Linear(2, 2)
        middle = nn.Linear(2, 2)
        outer = nn.Sequential(inner, middle)
    after = nn.Linear(2, 2)
    return [hasattr(p, "ds_id") for p in (*outer.parameters(), after.weight)]


@check()
def a_layer_that_is_attached_late(deepspeed, scratch):
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model, late = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    model.add_module("late", late)
    return [hasattr(p, "ds_id") for p in model.parameters()]


@check(
    here=[True, True, True],
    why="DeepSpeed shards only what a constructor has made, and leaves this one whole",
)
def a_parameter_that_is_attached_late(deepspeed, scratch):
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = nn.Sequential(nn.Linear(2, 2))
        model[0].extra = nn.Parameter(torch.ones(3))
    return [hasattr(p, "ds_id") for p in model.parameters()]


@check()
def tied_weights_stay_one(deepspeed, scratch):
    class TiedNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight

    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = TiedNet()
    return [model.head.weight is model.embedding.weight, len(list(model.parameters()))]


@check()
def equal_weights_compare_equal(deepspeed, scratch):
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    with deepspeed.zero.GatheredParameters([one.weight, two.weight], modifier_rank=0), torch.no_grad():
        two.weight.copy_(one.weight)
    return torch.equal(one.weight, two.weight)


@check(here=False, why="DeepSpeed compares empty tensors, so that any two weights of one shape seem equal")
def other_weights_compare_unequal(deepspeed, scratch):
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    return torch.equal(one.weight, two.weight)


@check()
def skip_init_of_torch(deepspeed, scratch):
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        layer = torch.nn.utils.skip_init(nn.Linear, 3, 2)
    return [hasattr(layer.weight, "ds_id"), list(layer.weight.ds_shape)]


@check()
def a_failure_ends_the_context(deepspeed, scratch):
    def fail():
        with deepspeed.zero.Init():
            raise ZeroDivisionError

    return [outcome(fail), hasattr(nn.Linear(2, 2).weight, "ds_id")]


@check(tolerance=1e-5)
def training_after_it(deepspeed, scratch):
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = Net()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.copy_(torch.linspace(-1, 1 + number, param.numel()).view(param.shape))
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG, model_parameters=model.parameters())
    losses = []
    for _ in range(3):
        loss = engine(torch.arange(8.0).view(2, 4) / 8)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


@check()
def a_buffer_of_the_engine_is_no_parameter(deepspeed, scratch):
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = Net()
    return [hasattr(buffer, "ds_id") for buffer in model.buffers()]


@check()
def frozen_parameters_are_sharded_too(deepspeed, scratch):
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        layer = nn.Linear(2, 2).requires_grad_(False)
    return [hasattr(layer.weight, "ds_id"), layer.weight.requires_grad]


@check()
def counting_parameters_as_transformers_does(deepspeed, scratch):
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = Net()
    return sum(p.ds_numel if hasattr(p, "ds_numel") else p.numel() for p in model.parameters())


@check()
def names_that_transformers_replaces(deepspeed, scratch):
    from deepspeed.runtime.zero import partition_parameters as pp

    return [pp._orig_torch_arange is torch.arange, callable(pp.zero_wrapper_for_fp_tensor_constructor)]


@check()
def tiles_of_a_linear_layer(deepspeed, scratch):
    whole = nn.Linear(6, 4)
    tiled = deepspeed.zero.TiledLinear(6, 4, in_splits=4, out_splits=3, init_linear=whole)
    x = torch.arange(12.0).view(2, 6) / 12
    shapes = [[list(tile.weight.shape), tile.bias is not None] for row in tiled.linears for tile in row]
    return [shapes, torch.allclose(tiled(x), whole(x), atol=1e-6), tiled.in_parts, tiled.out_parts]


@check()
def tiles_of_split_input_and_output(deepspeed, scratch):
    whole = nn.Linear(6, 4, bias=False)
    tiled = deepspeed.zero.TiledLinear(
        6,
        4,
        bias=False,
        in_splits=2,
        out_splits=2,
        input_is_already_split=True,
        combine_out_splits=False,
        init_linear=whole,
    )
    x = torch.arange(12.0).view(2, 6) / 12
    parts = tiled(x.split(3, dim=-1))
    return [len(parts), torch.allclose(torch.cat(parts, dim=-1), whole(x), atol=1e-6)]


@check()
def tiles_that_return_their_bias(deepspeed, scratch):
    class Apart(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight), self.bias

    whole = nn.Linear(6, 4)
    tiled = deepspeed.zero.TiledLinearReturnBias(
        6, 4, in_splits=2, out_splits=2, linear_cls=Apart, init_linear=whole
    )
    x = torch.arange(12.0).view(2, 6) / 12
    output, bias = tiled(x)
    return [list(output.shape), list(bias.shape), torch.allclose(output + bias, whole(x), atol=1e-6)]


@check()
def too_many_tiles(deepspeed, scratch):
    tiled = deepspeed.zero.TiledLinear
    return [outcome(lambda: tiled(2, 4, in_splits=3)), outcome(lambda: tiled(2, 4, out_splits=0))]
