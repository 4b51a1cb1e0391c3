"""`deepspeed.comm`: joining, queries, collectives and the log."""

from __future__ import annotations

import torch

from tests.deepspeed.checks import check, outcome


def joined(deepspeed):
    """`deepspeed.comm`, in a world that has been joined."""
    deepspeed.init_distributed("gloo")
    return deepspeed.comm


def numbers(tensor):
    """A tensor's values as a list."""
    return tensor.tolist()


@check()
def a_world_of_one_is_joined(deepspeed, scratch):
    before = deepspeed.comm.is_initialized()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return [before, deepspeed.comm.is_initialized(), torch.distributed.is_initialized()]


@check()
def joining_twice_does_no_harm(deepspeed, scratch):
    deepspeed.init_distributed("gloo")
    deepspeed.init_distributed("gloo")
    deepspeed.init_distributed(dist_init_required=False)
    return deepspeed.comm.get_world_size()


@check(
    here=[0, 1, 0, 0, [0], True, True],
    why="DeepSpeed finds no rank in the world when no group is named",
)
def queries_of_one_rank(deepspeed, scratch):
    comm = joined(deepspeed)
    asked = (comm.get_rank(), comm.get_world_size(), comm.get_local_rank())
    return [
        *asked,
        comm.get_global_rank(comm.get_world_group(), 0),
        comm.get_all_ranks_from_group(),
        comm.get_world_group() is not None,
        comm.is_available(),
    ]


@check()
def features_of_torch(deepspeed, scratch):
    comm = joined(deepspeed)
    names = ("has_all_gather_into_tensor", "has_reduce_scatter_tensor", "has_coalescing_manager")
    return [bool(getattr(comm, name)()) for name in names]


@check()
def places_by_the_launcher(deepspeed, scratch):
    comm = deepspeed.comm
    return [
        getattr(comm, f"get_{name}_from_launcher")() for name in ("local_rank", "world_rank", "world_size")
    ]


@check()
def sums_of_one_rank(deepspeed, scratch):
    comm = joined(deepspeed)
    x = torch.tensor([1.0, 2.0])
    comm.all_reduce(x)
    comm.all_reduce(x, comm.ReduceOp.MAX, None, False, False, "mine")
    comm.inference_all_reduce(x)
    comm.all_reduce_coalesced([x])
    comm.reduce(x, 0)
    return numbers(x)


@check()
def gathering_of_one_rank(deepspeed, scratch):
    comm = joined(deepspeed)
    x = torch.arange(4.0)
    flat, parts, piece = torch.zeros(4), [torch.zeros(4)], torch.zeros(4)
    comm.all_gather_into_tensor(flat, x)
    comm.all_gather(parts, x)
    comm.reduce_scatter_tensor(piece, x)
    other = torch.zeros(4)
    comm.allgather_fn(other, x)
    return [numbers(t) for t in (flat, parts[0], piece, other)]


@check()
def objects_of_one_rank(deepspeed, scratch):
    comm = joined(deepspeed)
    gathered, sent = [None], [{"a": 1}, "b"]
    comm.all_gather_object(gathered, {"x": [1, 2]})
    comm.broadcast_object_list(sent, 0)
    return [gathered, sent]


@check()
def an_asynchronous_sum_gives_a_handle(deepspeed, scratch):
    comm = joined(deepspeed)
    x = torch.ones(2)
    handle = comm.all_reduce(x, async_op=True)
    handle.wait()
    return [numbers(x), comm.all_reduce(x) is None]


@check()
def a_mesh_of_one(deepspeed, scratch):
    comm = joined(deepspeed)
    mesh = comm.initialize_mesh_device((1, 1), ("data_parallel", "sequence_parallel"))
    group = mesh.get_group(mesh_dim="sequence_parallel")
    return [list(mesh.mesh_dim_names), comm.get_world_size(group), comm.get_rank(group)]


@check()
def a_message_that_is_no_operation(deepspeed, scratch):
    comm = joined(deepspeed)
    return [
        outcome(lambda: comm.P2POp(comm.all_reduce, torch.ones(1), 0)),
        outcome(lambda: comm.P2POp(comm.isend, torch.ones(1), 0)),
    ]


@check()
def nothing_is_counted_unless_asked(deepspeed, scratch):
    comm = joined(deepspeed)
    comm.reset_log()
    comm.all_reduce(torch.ones(2))
    return [comm.has_comm_data(), comm.get_comm_operation_count(), comm.get_logged_comm_ops()]


def counted(deepspeed, **settings):
    """The summary of a few calls: name -> size -> count and size."""
    comm = joined(deepspeed)
    comm.reset_log()
    comm.configure(enabled=True, **settings)
    try:
        for _ in range(3):
            comm.all_reduce(torch.ones(2))
        comm.all_reduce(torch.ones(5), log_name="mine")
        comm.broadcast(torch.ones(2, dtype=torch.float64), 0, prof=True)
        comm.barrier()
        figures = {}
        for name in comm.get_logged_comm_ops():
            found = comm.comm.comms_logger.comms_dict[name]
            figures[name] = {str(size): found[size][0] for size in sorted(found)}
        return [figures, comm.get_comm_operation_count(), comm.has_comm_data()]
    finally:
        comm.configure(enabled=False, prof_all=True, prof_ops=[], debug=False)
        comm.reset_log()


@check()
def calls_are_counted_by_name_and_size(deepspeed, scratch):
    return counted(deepspeed)


@check()
def only_named_calls_are_counted(deepspeed, scratch):
    return counted(deepspeed, prof_all=False, prof_ops=["mine"])


@check(
    here=["all_reduce | [Caller Func: a_caller_is_named]"],
    why="DeepSpeed names a function of its own, three frames above the call",
)
def a_caller_is_named(deepspeed, scratch):
    comm = joined(deepspeed)
    comm.reset_log()
    comm.configure(enabled=True, debug=True)
    try:
        comm.all_reduce(torch.ones(2))
        return comm.get_logged_comm_ops()
    finally:
        comm.configure(enabled=False, debug=False)
        comm.reset_log()


@check()
def the_summary_as_a_dictionary(deepspeed, scratch):
    comm = joined(deepspeed)
    comm.reset_log()
    comm.configure(enabled=True)
    try:
        comm.all_reduce(torch.ones(256))
        found = comm.log_summary(return_dict=True, show_straggler=True)
        entry = found["summary"]["all_reduce"][1024]
        slow = found["straggler_analysis"]["all_reduce"][1024]
        nothing = comm.log_summary()
    finally:
        comm.configure(enabled=False)
        comm.reset_log()
    meta = found["metadata"]
    keys = [sorted(part) for part in (found, entry, slow, meta)]
    plain = [entry["count"], entry["msg_size_bytes"], entry["msg_size_str"], slow["count"]]
    return [keys, plain, meta["world_size"], meta["rank"], nothing]


@check()
def rates_of_calls(deepspeed, scratch):
    from deepspeed.utils.comms_logging import calc_bw_log, convert_size

    joined(deepspeed)
    names = ("all_reduce", "all_gather", "reduce_scatter_tensor", "all_to_all_single", "broadcast", "send")
    rates = {name: list(calc_bw_log(name, 1_000_000, 2.0)) for name in names}
    return [rates, [convert_size(size) for size in (0, 1, 1023, 1024, 1536, 10**6, 3 * 2**30)]]


@check(ranks=2)
def queries_of_two_ranks(deepspeed, scratch):
    comm = joined(deepspeed)
    alone = [comm.new_group([rank]) for rank in range(2)]
    both = comm.new_group([0, 1])
    return [
        *(comm.get_world_size(), comm.get_world_size(both), comm.get_rank(both)),
        *(comm.get_world_size(alone[0]), comm.get_rank(alone[1]), comm.get_world_size(alone[1])),
        *(comm.get_all_ranks_from_group(both), comm.get_all_ranks_from_group(alone[0])),
        comm.get_global_rank(both, 1),
    ]


@check(ranks=2)
def reductions_of_two_ranks(deepspeed, scratch):
    comm = joined(deepspeed)
    own = torch.tensor([1.0, -2.0]) * (comm.get_rank() + 1)
    found = {}
    for name in ("SUM", "MAX", "MIN", "PRODUCT"):
        x = own.clone()
        comm.all_reduce(x, op=getattr(comm.ReduceOp, name))
        found[name] = numbers(x)
    x, y = own.clone(), own.clone() + 1
    comm.all_reduce_coalesced([x, y])
    z = own.clone()
    comm.inference_all_reduce(z)
    w = own.clone()
    comm.reduce(w, dst=0)
    return [found, numbers(x), numbers(y), numbers(z), numbers(w)]


@check(ranks=2)
def scattering_of_two_ranks(deepspeed, scratch):
    comm = joined(deepspeed)
    rank = comm.get_rank()
    whole = torch.arange(4.0) * (rank + 1)
    piece, other, third = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    comm.reduce_scatter_tensor(piece, whole)
    comm.reduce_scatter_fn(other, whole)
    comm.reduce_scatter(third, list(whole.chunk(2)))
    part = torch.zeros(2)
    comm.scatter(part, list(whole.chunk(2)) if rank == 0 else None, src=0)
    return [numbers(t) for t in (piece, other, third, part)]


@check(ranks=2)
def gathering_of_two_ranks(deepspeed, scratch):
    comm = joined(deepspeed)
    rank = comm.get_rank()
    own = torch.full((2,), float(rank + 1))
    flat, parts = torch.zeros(4), [torch.zeros(2), torch.zeros(2)]
    comm.all_gather_into_tensor(flat, own)
    comm.all_gather(parts, own)
    gathered = [torch.zeros(2), torch.zeros(2)] if rank == 0 else None
    comm.gather(own, gathered, dst=0)
    objects = [None, None]
    comm.all_gather_object(objects, {"rank": rank})
    return [numbers(flat), [numbers(t) for t in parts], [numbers(t) for t in gathered or []], objects]


@check(ranks=2)
def exchanges_of_two_ranks(deepspeed, scratch):
    comm = joined(deepspeed)
    rank = comm.get_rank()
    out = torch.zeros(4)
    comm.all_to_all_single(out, torch.arange(4.0) + 10 * rank)
    uneven = torch.zeros(2 if rank == 0 else 4)
    comm.all_to_all_single(uneven, torch.arange(3.0) + 10 * rank, [1, 1] if rank == 0 else [2, 2], [1, 2])
    x = torch.zeros(1)
    if rank == 0:
        comm.send(torch.tensor([7.0]), dst=1, tag=3)
        comm.recv(x, src=1)
    else:
        comm.recv(x, src=0, tag=3)
        comm.send(x + 1, dst=0)
    return [numbers(out), numbers(uneven), numbers(x)]


@check(ranks=2)
def messages_in_a_batch(deepspeed, scratch):
    comm = joined(deepspeed)
    rank = comm.get_rank()
    x = torch.zeros(2)
    messages = [
        comm.P2POp(comm.isend, torch.full((2,), rank + 1.0), 1 - rank),
        comm.P2POp(comm.irecv, x, 1 - rank),
    ]
    for handle in comm.batch_isend_irecv(messages):
        handle.wait()
    y = torch.zeros(1)
    if rank == 0:
        comm.irecv(y, src=1).wait()
    else:
        comm.isend(torch.tensor([5.0]), dst=0).wait()
    return [numbers(x), numbers(y)]


@check(ranks=2)
def broadcasts_of_two_ranks(deepspeed, scratch):
    comm = joined(deepspeed)
    rank = comm.get_rank()
    x = torch.full((2,), float(rank))
    comm.broadcast(x, src=1)
    objects = [f"of {rank}", rank]
    comm.broadcast_object_list(objects, src=1)
    comm.barrier()
    comm.monitored_barrier()
    return [numbers(x), objects]


@check(ranks=2)
def rates_of_two_ranks(deepspeed, scratch):
    from deepspeed.utils.comms_logging import calc_bw_log

    joined(deepspeed)
    names = ("all_reduce", "all_gather", "reduce_scatter_tensor", "all_to_all_single", "broadcast", "send")
    return {name: list(calc_bw_log(name, 1_000_000, 2.0)) for name in names}


@check(ranks=2)
def groups_before_initialize(deepspeed, scratch):
    from deepspeed.utils import groups

    joined(deepspeed)
    return [
        groups._get_data_parallel_world_size(),
        groups._get_data_parallel_rank(),
        deepspeed.comm.get_world_size(groups._get_data_parallel_group()),
        groups._get_sequence_parallel_world_size(),
        groups._get_sequence_parallel_rank(),
        groups._get_model_parallel_world_size(),
    ]


@check(ranks=2)
def experts_of_a_larger_world(deepspeed, scratch):
    from deepspeed.utils import groups

    joined(deepspeed)
    return [
        [sorted(map(list, part)) for part in groups._get_expert_parallel_ranks(*sizes)]
        for sizes in ((16, 2, 4), (8, 1, 2), (8, 2, 2, 2))
    ]


def attention(query, key, value):
    """Attention of `[s, b, h, d]`."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)).softmax(-1)
    return (scores @ v).permute(2, 0, 1, 3).contiguous()


def shared_attention(deepspeed, heads, kv_heads, batch_dim=1):
    """Outputs and gradients of this rank's piece, and of the undivided attention's same piece."""
    from deepspeed.sequence.layer import DistributedAttention

    comm = joined(deepspeed)
    rank = comm.get_rank()
    torch.manual_seed(3)
    whole = [torch.randn(4, 2, count, 3) for count in (heads, kv_heads, kv_heads)]
    x = [t.requires_grad_() for t in whole]
    attention(*x).square().sum().backward()
    own = [t.detach().chunk(2)[rank].clone() for t in whole]
    if batch_dim == 0:
        own = [t.transpose(0, 1).contiguous() for t in own]

    class Local(torch.nn.Module):
        def forward(self, *parts):
            if batch_dim == 0:
                return attention(*(p.transpose(0, 1) for p in parts)).transpose(0, 1).contiguous()
            return attention(*parts)

    mine = [t.requires_grad_() for t in own]
    layer = DistributedAttention(Local(), comm.new_group([0, 1]), scatter_idx=2, gather_idx=1 - batch_dim)
    output = layer(*mine, batch_dim)
    output.square().sum().backward()
    grads = [t.grad.transpose(0, 1) if batch_dim == 0 else t.grad for t in mine]
    errors = [float((g - t.grad.chunk(2)[rank]).abs().max()) < 1e-5 for g, t in zip(grads, x, strict=True)]
    return [list(output.shape), errors, output.flatten()[:6].tolist()]


@check(ranks=2, tolerance=1e-5)
def attention_over_two_ranks(deepspeed, scratch):
    return shared_attention(deepspeed, 4, 4)


@check(ranks=2, tolerance=1e-5)
def attention_over_two_ranks_batch_first(deepspeed, scratch):
    return shared_attention(deepspeed, 4, 4, batch_dim=0)


@check(ranks=2, tolerance=1e-5)
def attention_over_two_ranks_with_shared_keys(deepspeed, scratch):
    return shared_attention(deepspeed, 4, 2)


@check(ranks=2)
def a_tensor_in_pieces(deepspeed, scratch):
    from deepspeed.runtime.utils import PartitionedTensor

    comm = joined(deepspeed)
    group = comm.get_world_group()
    found = []
    for shape in ((2, 3), (4, 4)):
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        piece = PartitionedTensor(whole, group)
        again = PartitionedTensor.from_meta(piece.to_meta(), piece.data(), group, device="cpu")
        found += [numbers(piece.data()), numbers(piece.to_meta()), list(piece.local_size())]
        found += [torch.equal(piece.full(), whole), torch.equal(again.full(), whole), list(piece.full_size())]
    return found


class Slices:
    """An `mpu` that says that both ranks hold slices of one model."""

    def __init__(self, comm):
        self.group, self.rank = comm.get_world_group(), comm.get_rank()

    def get_model_parallel_group(self):
        return self.group

    def get_model_parallel_rank(self):
        return self.rank


@check(ranks=2)
def clipping_over_slices(deepspeed, scratch):
    from deepspeed.runtime.utils import clip_grad_norm_

    comm = joined(deepspeed)
    found = []
    for norm_type in (2, float("inf")):
        whole, part = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        whole.grad, part.grad = torch.tensor([3.0, 4.0]), torch.tensor([12.0, 5.0]) * (comm.get_rank() + 1)
        part.model_parallel = True
        norm = clip_grad_norm_([whole, part], 2.0, norm_type=norm_type, mpu=Slices(comm))
        found += [float(norm), numbers(whole.grad), numbers(part.grad)]
    return found
