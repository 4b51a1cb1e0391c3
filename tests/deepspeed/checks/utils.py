"""`deepspeed.utils`, `runtime.utils` and what a script imports from the top."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging

import torch

from tests.deepspeed.checks import check, outcome


def printed(run):
    """What `run` prints."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        run()
    return text.getvalue()


@check()
def the_logger(deepspeed, scratch):
    from deepspeed.utils import logger

    found = [logger.name, logger.level, logger.propagate, len(logger.handlers)]
    return [*found, logger is logging.getLogger("DeepSpeed"), logger is deepspeed.logger]


@check()
def levels_by_name(deepspeed, scratch):
    from deepspeed.utils.logging import get_log_level_from_string, logger, set_log_level_from_string

    set_log_level_from_string("info")
    now = [logger.level, logger.handlers[0].level]
    set_log_level_from_string("warning")
    return [now, get_log_level_from_string("ERROR"), outcome(lambda: get_log_level_from_string("loud"))]


@check()
def messages_of_ranks(deepspeed, scratch):
    from deepspeed.utils.logging import get_dist_msg

    deepspeed.init_distributed("gloo")
    return [get_dist_msg("x", ranks) for ranks in (None, [], [0], [-1], [1], [1, 0])]


@check()
def a_message_is_printed_once(deepspeed, scratch):
    from deepspeed.utils.logging import logger, print_dist

    deepspeed.init_distributed("gloo")
    text = printed(lambda: (print_dist("here", [0]), print_dist("not here", [1])))
    return [text, callable(logger.warning_once)]


@check()
def attributes_by_a_dotted_name(deepspeed, scratch):
    from deepspeed.utils import recursive_getattr, recursive_setattr

    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 3)), torch.nn.ReLU())
    recursive_setattr(model, "0.0", torch.nn.Linear(2, 5))
    recursive_setattr(model, "1", torch.nn.Tanh())
    shape = list(recursive_getattr(model, "0.0.weight").shape)
    return [shape, type(model[1]).__name__, outcome(lambda: recursive_getattr(model, "0.9"))]


@check()
def a_range_around_a_function(deepspeed, scratch):
    from deepspeed.utils import instrument_w_nvtx

    @instrument_w_nvtx
    def add(x, y=1):
        return x + y

    return [add(2), add(2, y=3)]


@check()
def modules_without_memory(deepspeed, scratch):
    with deepspeed.OnDevice(dtype=torch.float16, device="meta"):
        layer = torch.nn.Linear(3, 4)
        x = torch.zeros(2)
        count = torch.zeros(2, dtype=torch.int64)
    after = torch.nn.Linear(3, 4)
    tensors = (layer.weight, x, count, after.weight)
    return [[t.device.type, str(t.dtype)] for t in tensors]


@check()
def modules_on_the_cpu(deepspeed, scratch):
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="cpu"):
        layer = torch.nn.Linear(3, 4)
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta", enabled=False):
        other = torch.nn.Linear(3, 4)
    return [[str(m.weight.dtype), m.weight.device.type] for m in (layer, other)]


@check()
def a_loader_without_an_end(deepspeed, scratch):
    from deepspeed.utils import RepeatingLoader

    loader = RepeatingLoader([1, 2, 3])
    return [next(loader) for _ in range(7)]


@check()
def seeds(deepspeed, scratch):
    import random

    import numpy
    from deepspeed.runtime.utils import set_random_seed

    found = []
    for seed in (7, 2**33 + 7, 7):
        set_random_seed(seed)
        found.append([random.random(), float(numpy.random.rand()), float(torch.rand(1))])
    return found


@check()
def uniform_parts(deepspeed, scratch):
    from deepspeed.runtime.utils import partition_uniform

    cases = ((10, 1), (10, 2), (10, 3), (10, 4), (2, 4), (4, 4), (0, 2), (7, 5))
    return [[int(x) for x in partition_uniform(*case)] for case in cases]


@check()
def balanced_parts(deepspeed, scratch):
    from deepspeed.runtime.utils import partition_balanced

    weights = (
        [1, 1, 1, 1],
        [1, 2, 3, 4, 5, 6],
        [5, 1, 1, 1, 1],
        [0, 0, 4, 0, 0],
        [3, 1],
        [9, 1, 1, 9, 1, 1, 1],
    )
    return [[int(x) for x in partition_balanced(w, parts)] for w in weights for parts in (1, 2, 3, 4)]


@check()
def sums_of_prefixes(deepspeed, scratch):
    from deepspeed.runtime.utils import prefix_sum_inc

    return list(prefix_sum_inc([3, 4, 5]))


@check()
def tensors_on_another_device(deepspeed, scratch):
    from deepspeed.runtime.utils import copy_to_device, move_to_device

    nested = {"a": [torch.ones(1), (torch.ones(2), torch.ones(3))]}
    moved = move_to_device(nested, "cpu")
    kept = copy_to_device({"x": torch.ones(2), "y": "text"}, "meta", torch.is_tensor)
    return [
        *(type(moved["a"]).__name__, type(moved["a"][1]).__name__, moved["a"][1][1].tolist()),
        *(kept["x"].device.type, kept["y"]),
    ]


@check()
def a_clipped_gradient(deepspeed, scratch):
    from deepspeed.runtime.utils import clip_grad_norm_

    found = []
    for norm_type, most in ((2, 1.0), (2, 100.0), (1, 1.0), (float("inf"), 2.0)):
        param, without = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
        param.grad = torch.tensor([3.0, -4.0])
        norm = clip_grad_norm_([param, without], most, norm_type)
        found.append([float(norm), param.grad.tolist()])
    return found


@check()
def norms_of_tensors(deepspeed, scratch):
    from deepspeed.runtime.utils import get_global_norm, get_global_norm_of_tensors, get_weight_norm

    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([12.0])]
    return [
        *(float(get_global_norm([3.0, 4.0])), float(get_global_norm([3.0, float("nan")]))),
        *(
            float(get_global_norm_of_tensors(tensors)),
            float(get_global_norm_of_tensors(tensors, float("inf"))),
        ),
        float(get_weight_norm([torch.nn.Parameter(t) for t in tensors])),
    ]


@check()
def clipped_tensors(deepspeed, scratch):
    from deepspeed.runtime.utils import clip_tensors_by_global_norm

    x, y = torch.tensor([3.0, 4.0]), torch.tensor([0.3, 0.4])
    norms = [float(clip_tensors_by_global_norm([x], 1.0)), float(clip_tensors_by_global_norm([y], 1.0))]
    return [norms, x.tolist(), y.tolist()]


@check()
def values_that_are_no_numbers(deepspeed, scratch):
    from deepspeed.runtime.utils import has_inf_or_nan

    values = ([1.0, 2.0], [1.0, float("nan")], [float("-inf")], [])
    return [bool(has_inf_or_nan(torch.tensor(v))) for v in values]


@check()
def the_only_item(deepspeed, scratch):
    from deepspeed.runtime.utils import ensure_directory_exists, get_only_unique_item

    ensure_directory_exists(str(scratch / "a" / "b.txt"))
    refused = [outcome(lambda items=items: get_only_unique_item(items)) for items in ([1, 2], [])]
    return [get_only_unique_item([3, 3]), refused, (scratch / "a").is_dir()]


@check()
def memory_in_use(deepspeed, scratch):
    from deepspeed.runtime.utils import see_memory_usage

    text = printed(lambda: see_memory_usage("at the start", force=True))
    parts = ("at the start", "MA ", "Max_MA ", "CA ", "CPU Virtual Memory:", "used = ", "percent = ")
    return [printed(lambda: see_memory_usage("quiet")), [part in text for part in parts]]


@check()
def arguments_of_a_script(deepspeed, scratch):
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    given = parser.parse_args(["--deepspeed", "--deepspeed_config", "x.json"])
    return [vars(parser.parse_args([])), vars(given)]


@check()
def versions(deepspeed, scratch):
    numbers = [deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__]
    return [deepspeed.__version__, numbers]


@check()
def names_of_optimizers(deepspeed, scratch):
    from deepspeed.runtime import config

    names = ("ADAM", "ADAMW", "ADAGRAD", "LAMB", "LION", "MUON", "MUADAM", "MUADAMW", "MUSGD")
    return [[getattr(config, f"{n}_OPTIMIZER") for n in names], list(config.DEEPSPEED_OPTIMIZERS)]


@check()
def words_of_the_json(deepspeed, scratch):
    from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME
    from deepspeed.runtime import constants

    names = ("ROUTE_TRAIN", "ROUTE_EVAL", "FP16", "BFLOAT16", "OPTIMIZER", "TYPE", "GRADIENT_CLIPPING")
    return [[getattr(constants, n) for n in names], DEEPSPEED_ENVIRONMENT_NAME]


@check()
def a_json_from_anywhere(deepspeed, scratch):
    import base64

    document = {"train_batch_size": 8, "fp16": {"enabled": True}}
    path = scratch / "ds.json"
    path.write_text(json.dumps(document))
    encoded = base64.urlsafe_b64encode(json.dumps(document).encode()).decode()
    found = [deepspeed.load_ds_config(source) == document for source in (document, str(path), encoded)]
    return [
        found,
        outcome(lambda: deepspeed.load_ds_config("none.json")),
        outcome(lambda: deepspeed.load_ds_config(3)),
    ]


@check()
def marks_for_muon(deepspeed, scratch):
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 3), "layer": torch.nn.Linear(3, 3)})
    config = argparse.Namespace(optimizer_name="muon", optimizer_params={})
    deepspeed.set_optimizer_flags(config, model)
    return {name: param.use_muon for name, param in model.named_parameters()}


@check()
def groups_of_one_rank(deepspeed, scratch):
    from deepspeed.utils import groups

    deepspeed.init_distributed("gloo")
    return [
        *(groups._get_data_parallel_world_size(), groups._get_data_parallel_rank()),
        *(groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_rank()),
        *(groups._get_model_parallel_world_size(), groups._get_expert_model_parallel_world_size()),
        outcome(lambda: groups.initialize(ep_size=1)),
    ]


@check()
def parameters_of_experts(deepspeed, scratch):
    from deepspeed.moe.utils import configure_moe_param_groups, has_moe_layers, is_moe_param

    dense, expert = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    expert.allreduce, expert.group_name = False, "ep_size_1"
    groups = configure_moe_param_groups([dense, expert])
    shown = [[g["name"], g.get("moe", False), len(g["params"])] for g in groups]
    return [shown, list(has_moe_layers(torch.nn.Linear(1, 1))), is_moe_param(expert), is_moe_param(dense)]


@check()
def a_layer_with_adapters(deepspeed, scratch):
    from deepspeed.linear import LoRAConfig, OptimizedLinear

    layer = OptimizedLinear(6, 4, lora_config=LoRAConfig(lora_r=2, lora_alpha=4), dtype=torch.float32)
    plain = torch.nn.functional.linear(x := torch.ones(3, 6), layer.weight)
    same = bool(torch.allclose(layer(x), plain))
    with torch.no_grad():
        layer.lora_weight_2.weight.fill_(1.0)
    change = layer(x) - plain
    expected = 2.0 * layer.lora_weight_1(x).sum(-1, keepdim=True)
    trained = sorted(name for name, p in layer.named_parameters() if p.requires_grad)
    return [same, bool(torch.allclose(change, expected.expand(3, 4), atol=1e-5)), trained]


@check()
def a_layer_without_adapters(deepspeed, scratch):
    from deepspeed.linear import OptimizedLinear

    layer = OptimizedLinear(6, 4, dtype=torch.float32)
    return [list(layer(torch.ones(2, 6)).shape), sorted(name for name, _ in layer.named_parameters())]


@check(here=[True, True, False], why="the heading of the table has words of its own")
def estimates_of_memory(deepspeed, scratch):
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_cold
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_cold

    two = printed(lambda: estimate_zero2_model_states_mem_needs_all_cold(total_params=10**9))
    three = printed(
        lambda: estimate_zero3_model_states_mem_needs_all_cold(total_params=10**9, largest_layer_params=10**7)
    )
    return ["offload_optimizer=" in two, "offload_param=" in three, "1000M total params" in two]


@check()
def an_indexed_dataset(deepspeed, scratch):
    import numpy
    from deepspeed.runtime.data_pipeline.data_sampling import indexed_dataset

    prefix = str(scratch / "data")
    builder = indexed_dataset.make_builder(f"{prefix}.bin", impl="mmap", vocab_size=100)
    builder.add_item(torch.tensor([1, 2, 3]))
    builder.end_document()
    builder.add_item(torch.tensor([4, 5]))
    builder.add_item(torch.tensor([6]))
    builder.end_document()
    builder.finalize(f"{prefix}.idx")
    found = indexed_dataset.make_dataset(prefix, impl="mmap")
    tables = [[int(x) for x in table] for table in (found.sizes, found.doc_idx)]
    return [
        *(len(found), str(numpy.dtype(found.dtype)), *tables),
        *([x.tolist() for x in found[0:3]], found[1].tolist(), found.get(0, offset=1, length=2).tolist()),
        indexed_dataset.MMapIndexedDataset.exists(prefix),
    ]
