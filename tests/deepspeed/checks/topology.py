"""Where ranks sit."""

from __future__ import annotations

import torch

from tests.deepspeed.checks import check, outcome


def topology(axes=("x", "y"), dims=(2, 3)):
    from deepspeed.runtime.pipe.topology import ProcessTopology

    return ProcessTopology(axes=list(axes), dims=list(dims))


def three_d(pipe=2, model=2, data=2):
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    return PipeModelDataParallelTopology(num_pp=pipe, num_mp=model, num_dp=data)


def two_d(pipe=4, data=2):
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    return PipeDataParallelTopology(num_pp=pipe, num_dp=data)


@check()
def sizes(deepspeed, scratch):
    t = topology()
    return [t.world_size(), t.get_dim("x"), t.get_dim("y"), t.get_dim("z"), list(t.get_axis_names())]


@check()
def ranks_of_places(deepspeed, scratch):
    t = topology()
    return [[t.get_rank(x=x, y=y) for y in range(3)] for x in range(2)]


@check()
def places_of_ranks(deepspeed, scratch):
    t = topology()
    return [[t.get_coord(rank).x, t.get_coord(rank).y] for rank in range(6)]


@check()
def a_place_is_a_named_tuple(deepspeed, scratch):
    place = topology().get_coord(4)
    return [type(place).__name__, list(place._fields), list(place)]


@check()
def the_mapping(deepspeed, scratch):
    t = topology(("a", "b", "c"), (2, 1, 2))
    return [[list(place), rank] for place, rank in t.mapping.items()]


@check()
def as_text(deepspeed, scratch):
    return str(topology(("pipe", "data"), (2, 1)))


@check()
def wrong_places(deepspeed, scratch):
    t = topology()
    attempts = {
        "one axis": lambda: t.get_rank(x=0),
        "an unknown axis": lambda: t.get_rank(x=0, z=0),
        "outside": lambda: t.get_rank(x=2, y=0),
        "no such rank": lambda: t.get_coord(6),
        "an unknown filter": lambda: t.filter_match(z=0),
        "an unknown list": lambda: t.get_axis_list("z", 0),
    }
    return {name: outcome(attempt) for name, attempt in attempts.items()}


@check()
def groups_along_axes(deepspeed, scratch):
    t = topology(("pipe", "data", "model"), (2, 2, 2))
    return {axis: t.get_axis_comm_lists(axis) for axis in ("pipe", "data", "model", "other")}


@check()
def groups_of_uneven_axes(deepspeed, scratch):
    t = topology(("a", "b", "c"), (3, 1, 2))
    return {axis: t.get_axis_comm_lists(axis) for axis in "abc"}


@check()
def ranks_that_match(deepspeed, scratch):
    t = topology(("pipe", "data", "model"), (2, 2, 2))
    return [t.filter_match(pipe=0), t.filter_match(pipe=0, data=1), t.filter_match(), t.filter_match(model=1)]


@check()
def ranks_at_an_index(deepspeed, scratch):
    t = topology()
    return [t.get_axis_list("x", 0), t.get_axis_list("x", 1), t.get_axis_list("y", 2)]


@check()
def text_of_ranks(deepspeed, scratch):
    t = topology(("a", "b"), (2, 2))
    return [
        t.get_rank_repr(rank=3),
        t.get_rank_repr(rank=3, omit_axes=["a"]),
        t.get_rank_repr(3, omit_axes=["a", "b"]),
        t.get_rank_repr(2, omit_axes=[], inner_sep="+"),
        t.get_rank_repr(2, omit_axes=[], inner_sep="🤗", outer_sep="_JEFF_"),
    ]


@check()
def pipes_and_data_are_left_out_of_text(deepspeed, scratch):
    return [[t.get_rank_repr(rank) for rank in range(4)] for t in (three_d(2, 2, 1), two_d(2, 2))]


@check()
def two_dimensions(deepspeed, scratch):
    t = two_d()
    return [
        list(t.get_axis_names()),
        t.world_size(),
        t.get_axis_comm_lists("data"),
        t.get_axis_list("pipe", 1),
    ]


@check()
def three_dimensions(deepspeed, scratch):
    t = three_d()
    return [list(t.get_axis_names()), [list(t.get_coord(rank)) for rank in range(8)]]


@check()
def three_dimensions_of_different_sizes(deepspeed, scratch):
    t = three_d(pipe=2, model=3, data=4)
    return {axis: [t.get_dim(axis), t.get_axis_comm_lists(axis)[:3]] for axis in ("pipe", "data", "model")}


@check()
def neighbours_in_three_dimensions(deepspeed, scratch):
    t = three_d(pipe=2, model=2, data=4)
    return [t.get_rank(pipe=1, data=2, model=1), t.filter_match(pipe=1, model=0), t.filter_match(data=3)]


def grid(deepspeed, made):
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid

    if not torch.distributed.is_initialized():
        deepspeed.init_distributed(dist_backend="gloo")
    return PipelineParallelGrid(topology=made)


def answers(g):
    return {
        "stage": [g.get_stage_id(), g.get_pipe_parallel_rank(), g.get_pipe_parallel_world_size()],
        "data": [g.get_data_parallel_id(), g.get_data_parallel_rank(), g.get_data_parallel_world_size()],
        "slice": [g.get_slice_parallel_rank(), g.get_slice_parallel_world_size()],
        "tensor": [g.get_tensor_model_parallel_rank(), g.get_tensor_model_parallel_world_size()],
        "model": [g.get_model_parallel_rank(), g.get_model_parallel_world_size()],
        "rank": [g.get_global_rank(), g.global_rank, g.world_size],
        "ends": [g.is_first_stage, g.is_last_stage],
        "sizes": [g.pipe_parallel_size, g.data_parallel_size, g.model_parallel_size, g.slice_parallel_size],
        "lists": [g.pp_group, g.dp_group, g.slice_group, g.pipe_groups, g.dp_groups, g.p2p_groups],
        "ids": [g.stage_id, g.data_parallel_id],
        "data ranks": list(g.get_data_parallel_group_ranks()),
        "pipeline": [g.get_pipeline_model_parallel_rank(), g.get_pipeline_model_parallel_world_size()],
    }


@check(ranks=2)
def a_grid_of_two_stages(deepspeed, scratch):
    return answers(grid(deepspeed, two_d(2, 1)))


@check(ranks=2)
def a_grid_of_two_replicas(deepspeed, scratch):
    return answers(grid(deepspeed, two_d(1, 2)))


@check(ranks=2)
def a_grid_of_two_slices(deepspeed, scratch):
    return answers(grid(deepspeed, three_d(1, 2, 1)))


@check(ranks=2)
def a_grid_without_topology(deepspeed, scratch):
    return answers(grid(deepspeed, None))


@check(ranks=4)
def a_grid_of_four_ranks(deepspeed, scratch):
    return [answers(grid(deepspeed, made)) for made in (two_d(2, 2), three_d(2, 2, 1), None)]


@check(ranks=4)
def ranks_of_other_stages(deepspeed, scratch):
    g = grid(deepspeed, two_d(2, 2))
    return [
        g.stage_to_global(0),
        g.stage_to_global(1),
        g.stage_to_global(1, data=0),
        g.stage_to_global(0, data=1),
    ]


@check(ranks=2)
def a_topology_of_another_size(deepspeed, scratch):
    return outcome(lambda: grid(deepspeed, two_d(4, 1)))


@check(ranks=2)
def a_topology_says_how_many_stages(deepspeed, scratch):
    if not torch.distributed.is_initialized():
        deepspeed.init_distributed(dist_backend="gloo")
    layers = [torch.nn.Linear(2, 2) for _ in range(4)]
    made = deepspeed.pipe.PipelineModule(layers=layers, topology=two_d(2, 1), partition_method="uniform")
    return [made.num_stages, made.topology().get_dim("pipe"), made.mpu().get_stage_id(), list(made.parts)]


@check()
def schedules_of_training(deepspeed, scratch):
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    sizes = [(1, 1, 0), (4, 1, 0), (3, 2, 0), (3, 2, 1), (2, 4, 1), (8, 4, 2), (8, 4, 3)]
    return [[repr(step) for step in TrainSchedule(*size)] for size in sizes]


@check()
def schedules_of_evaluation(deepspeed, scratch):
    from deepspeed.runtime.pipe.schedule import InferenceSchedule

    sizes = [(1, 1, 0), (4, 1, 0), (3, 2, 0), (3, 2, 1), (2, 4, 1), (8, 4, 3)]
    return [[repr(step) for step in InferenceSchedule(*size)] for size in sizes]


@check()
def schedules_of_accumulation(deepspeed, scratch):
    from deepspeed.runtime.pipe.schedule import DataParallelSchedule

    schedule = DataParallelSchedule(micro_batches=3, stages=1, stage_id=0)
    return [[repr(step) for step in schedule], schedule.num_pipe_buffers()]


@check()
def facts_of_a_schedule(deepspeed, scratch):
    from deepspeed.runtime.pipe import schedule

    s = schedule.TrainSchedule(micro_batches=8, stages=4, stage_id=3)
    load = schedule.LoadMicroBatch(buffer_id=2, extra="yes")
    return [
        [s.stage, s.num_stages, s.num_micro_batches, s.is_first_stage, s.is_last_stage, s.num_pipe_buffers()],
        [load.name, load.buffer_id, load.extra, load.kwargs, repr(load)],
    ]
