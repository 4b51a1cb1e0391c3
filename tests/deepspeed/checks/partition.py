"""Which layers each stage gets, and what is built."""

from __future__ import annotations

from itertools import product

import torch
from torch import nn

from tests.deepspeed.checks import check, outcome


def uniform(n, p):
    from deepspeed.runtime.utils import partition_uniform

    return [int(bound) for bound in partition_uniform(num_items=n, num_parts=p)]


def balanced(weights, p):
    from deepspeed.runtime.utils import partition_balanced

    return [int(bound) for bound in partition_balanced(weights=list(weights), num_parts=p)]


def tables(weights_of, counts, parts):
    return {f"{n} on {p}": balanced(weights_of(n), p) for n in counts for p in parts}


@check()
def uniform_bounds(deepspeed, scratch):
    return {f"{n} on {p}": uniform(n, p) for n in range(1, 10) for p in range(1, 6)}


@check()
def more_stages_than_layers(deepspeed, scratch):
    return [uniform(2, 5), balanced([1, 1], 5), balanced([7], 3), uniform(0, 2)]


@check()
def equal_layers(deepspeed, scratch):
    return tables(lambda n: [1] * n, range(1, 13), range(1, 6))


@check()
def heavy_ends(deepspeed, scratch):
    return tables(lambda n: [10, *[1] * (n - 2), 10], range(3, 13), range(2, 6))


@check()
def very_heavy_ends(deepspeed, scratch):
    return tables(lambda n: [100, *[12] * (n - 2), 100], range(3, 13), range(2, 6))


@check()
def growing_layers(deepspeed, scratch):
    return tables(lambda n: list(range(1, n + 1)), range(2, 11), range(2, 6))


@check()
def falling_layers(deepspeed, scratch):
    return tables(lambda n: list(range(n, 0, -1)), range(2, 11), range(2, 6))


@check()
def alternating_layers(deepspeed, scratch):
    return tables(lambda n: [3 if i % 2 else 1 for i in range(n)], range(2, 11), range(2, 6))


@check()
def layers_without_parameters(deepspeed, scratch):
    return tables(lambda n: [0] * n, range(1, 9), range(1, 5))


@check()
def all_rows_of_six_on_two(deepspeed, scratch):
    return {"".join(map(str, w)): balanced(w, 2) for w in product((0, 1), repeat=6)}


@check()
def all_rows_of_six_on_three(deepspeed, scratch):
    return {"".join(map(str, w)): balanced(w, 3) for w in product((0, 1), repeat=6)}


@check()
def all_rows_of_five_with_twos_on_three(deepspeed, scratch):
    return {"".join(map(str, w)): balanced(w, 3) for w in product((0, 1, 2), repeat=5)}


@check()
def large_counts(deepspeed, scratch):
    rows = [[50_000 * 768, *[7_087_872] * 12, 1536, 50_000 * 768], [10**9, 1, 10**9, 1, 1], [12345678] * 7]
    return [balanced(row, p) for row in rows for p in (2, 3, 4)]


class Wide(nn.Linear):
    """A layer with another name."""


class Odd9(nn.Linear):
    """A layer with a digit in its name."""


def flatten(x):
    return x


def row(deepspeed):
    spec = deepspeed.pipe.LayerSpec
    return [
        spec(Wide, 4, 4),
        spec(nn.Linear, 4, 4),
        flatten,
        spec(nn.Linear, 4, 4),
        nn.Tanh(),
        spec(nn.Linear, 4, 4),
        spec(Odd9, 4, 4),
    ]


def module(deepspeed, layers=None, stages=2, **arguments):
    if not torch.distributed.is_initialized():
        deepspeed.init_distributed(dist_backend="gloo")
    return deepspeed.pipe.PipelineModule(
        layers=row(deepspeed) if layers is None else layers, num_stages=stages, **arguments
    )


def parts(deepspeed, method, layers=None):
    return [int(bound) for bound in module(deepspeed, layers, partition_method=method).parts]


@check(ranks=2)
def methods(deepspeed, scratch):
    return {method: parts(deepspeed, method) for method in ("uniform", "parameters", "UNIFORM", "Parameters")}


@check(ranks=2)
def the_default_counts_parameters(deepspeed, scratch):
    spec = deepspeed.pipe.LayerSpec
    layers = [spec(nn.Linear, 30, 30), *[spec(nn.Linear, 4, 4)] * 3, spec(nn.Linear, 4, 30)]
    return [int(bound) for bound in module(deepspeed, layers).parts]


@check(ranks=2)
def frozen_parameters_do_not_count(deepspeed, scratch):
    frozen = nn.Linear(50, 50).requires_grad_(False)
    return parts(deepspeed, "parameters", [frozen, nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])


@check(ranks=2)
def classes_by_name(deepspeed, scratch):
    named = ("type:linear", "type:LINEAR", "TYPE:Linear", "type:wide", "type:wide|odd9", "type:^Linear$")
    return {method: parts(deepspeed, method) for method in named}


@check(ranks=2)
def functions_by_name(deepspeed, scratch):
    return parts(deepspeed, "type:flatten")


@check(
    ranks=2,
    here=[0, 3, 7],
    why="`type:^\\D+$` is read as written; DeepSpeed lower-cases it to `^\\d+$`, which matches nothing",
)
def a_regex_with_upper_case(deepspeed, scratch):
    return parts(deepspeed, r"type:^\D+$")


@check(ranks=2, here="accepted", why="a regex may hold a colon; DeepSpeed cuts it there")
def a_regex_with_a_colon(deepspeed, scratch):
    return outcome(lambda: parts(deepspeed, "type:(?:wide|odd9)"))


@check(ranks=2)
def what_is_refused(deepspeed, scratch):
    methods = ("type:nothing", "profile", "best", "type:(", "")
    return {method: outcome(lambda m=method: parts(deepspeed, m)) for method in methods}


@check(ranks=2)
def stages_that_do_not_fit(deepspeed, scratch):
    attempts = {
        "three stages": lambda: module(deepspeed, stages=3),
        "neither": lambda: module(deepspeed, stages=None),
        "a tuple": lambda: module(deepspeed, checkpointable_layers=("Wide",)),
        "a negative interval": lambda: module(deepspeed).set_checkpoint_interval(-1),
    }
    return {name: outcome(attempt) for name, attempt in attempts.items()}


@check(ranks=2)
def names_of_parameters(deepspeed, scratch):
    made = module(deepspeed, partition_method="uniform")
    return [sorted(name for name, _ in made.named_parameters()), made.stage_id, made.num_stages]


@check(ranks=2)
def owners(deepspeed, scratch):
    made = module(deepspeed, partition_method="uniform")
    wrong = {str(i): outcome(lambda i=i: made.stage_owner(i)) for i in (-1, 7)}
    return [[made.stage_owner(i) for i in range(7)], wrong, made.num_pipeline_stages()]


@check(ranks=2)
def tied_names(deepspeed, scratch):
    tied = deepspeed.pipe.TiedLayerSpec
    layers = [tied("ends", nn.Linear, 4, 4), nn.Tanh(), nn.Linear(4, 4), tied("ends", nn.Linear, 4, 4)]
    made = module(deepspeed, layers, partition_method="uniform")
    weights = [tuple(weight.shape) for weight, _ in made.get_tied_weights_and_groups()]
    ranks = {key: list(comm["ranks"]) for key, comm in made.tied_comms.items()}
    return [sorted(name for name, _ in made.named_parameters()), [list(w) for w in weights], ranks]


@check(ranks=2)
def tied_weights_begin_equal(deepspeed, scratch):
    tied = deepspeed.pipe.TiedLayerSpec
    torch.manual_seed(torch.distributed.get_rank())
    layers = [tied("ends", nn.Linear, 4, 4, bias=False), nn.Tanh(), tied("ends", nn.Linear, 4, 4, bias=False)]
    made = module(deepspeed, layers, partition_method="uniform")
    value = made.tied_modules["ends"].weight.detach().clone()
    other = value.clone()
    torch.distributed.broadcast(other, 1)
    return bool(torch.equal(value, other))


@check(ranks=2, here="refused", why="the same module on two stages would drift apart without a word")
def one_module_on_two_stages(deepspeed, scratch):
    shared = nn.Linear(4, 4)
    layers = [shared, nn.Tanh(), nn.Tanh(), shared]
    return outcome(lambda: module(deepspeed, layers, partition_method="uniform"))


@check(ranks=2)
def files_of_layers(deepspeed, scratch):
    made = module(deepspeed, partition_method="uniform")
    paths = [made.ckpt_layer_path("there", 0), made.ckpt_layer_path("there", 3), made.ckpt_prefix("a", "b")]
    return [str(path) for path in paths]


def weights(made):
    return {name: float(param.detach().double().sum()) for name, param in made.named_parameters()}


@check(ranks=2)
def seeded_layers(deepspeed, scratch):
    return weights(module(deepspeed, partition_method="uniform", seed_layers=True))


@check(ranks=2)
def another_base_seed(deepspeed, scratch):
    return weights(module(deepspeed, partition_method="uniform", seed_layers=True, base_seed=7))


@check(ranks=2)
def seeds_that_a_function_is_given(deepspeed, scratch):
    seeds = []
    made = module(
        deepspeed, partition_method="uniform", seed_layers=True, seed_fn=seeds.append, base_seed=100
    )
    made(torch.ones(2, 4))
    made(torch.ones(2, 4))
    return seeds


@check(ranks=2)
def initial_weights_of_one_seed(deepspeed, scratch):
    torch.manual_seed(11)
    return weights(module(deepspeed, partition_method="parameters"))


@check()
def specs(deepspeed, scratch):
    spec, tied = deepspeed.pipe.LayerSpec, deepspeed.pipe.TiedLayerSpec
    made = spec(nn.Linear, 3, 5, bias=False)
    ends = tied("k", nn.Linear, 3, 5, tied_weight_attr="bias")
    return [
        repr(made),
        list(made.build().weight.shape),
        ends.key,
        ends.tied_weight_attr,
        list(tied("k", nn.Linear, 3, 5).tied_weight_attr),
        outcome(lambda: spec(flatten)),
        outcome(lambda: spec(int)),
    ]
