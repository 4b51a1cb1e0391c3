"""The grouped products are each other's gradients, and torch's own agree with the loop."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megazero.ops.grouped_linear import (
    GROUPED_LINEAR,
    GROUPED_OUTER,
    GroupedFacts,
    Groups,
    add_by_group,
    grouped_linear,
    grouped_linear_reference,
    grouped_outer,
    grouped_outer_reference,
    reads_sizes,
    sums_by_group,
)
from tests.tables import over_table

CPU = torch.device("cpu")
TABLES = (GROUPED_LINEAR, GROUPED_OUTER)
SIZES = ((3, 0, 5, 1), (0, 4), (6, 0, 0), (7,), (1, 1, 1))


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@over_table("sizes", SIZES, ids=str)
def test_gradients_of_the_product_are_grouped_products(sizes):
    """Of y = x w_e^T: dx = dy w_e, and dw_e = dy_e^T x_e, by autograd through one product for each row."""
    rows, n, k = sum(sizes), 5, 3
    x, w = randn(1, rows, k).requires_grad_(), randn(2, len(sizes), n, k).requires_grad_()
    number = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    y = torch.stack([w[e] @ row for e, row in zip(number.tolist(), x, strict=True)])
    to = randn(3, rows, n)
    dx, dw = torch.autograd.grad(y, (x, w), to)
    groups = Groups.of(sizes, CPU)
    assert torch.allclose(grouped_linear(x.detach(), w.detach(), groups), y.detach())
    assert torch.allclose(grouped_linear(to, w.detach().transpose(1, 2), groups), dx)
    assert torch.allclose(grouped_outer(to, x.detach(), groups), dw)
    for e, size in enumerate(sizes):
        assert (dw[e].abs().max() == 0) == (size == 0)


BY_TORCH = [next(row.fn for row in table.implementations if row.name == "torch") for table in TABLES]
BATCHED = [next(row.fn for row in table.implementations if row.name == "batched") for table in TABLES]
FLOATS = over_table("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def check(ours, groups, dtype):
    """Both products by `ours` are the loop's over the same groups."""
    count, rows, n, k = groups.count, groups.rows, 16, 8
    x, w, to = (each.to(dtype) for each in (randn(1, rows, k), randn(2, count, n, k), randn(3, rows, n)))
    linear, outer = ours
    turned = w.transpose(1, 2)
    pairs = [
        (linear(x, w, groups), grouped_linear_reference(x, w, groups)),
        (linear(to, turned, groups), grouped_linear_reference(to, turned, groups)),
        (outer(to, x, groups), grouped_outer_reference(to, x, groups)),
    ]
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    for found, expected in pairs:
        assert found.dtype == dtype
        assert found.shape == expected.shape
        assert torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=tolerance)
        assert bool(found.isfinite().all())


@FLOATS
@over_table("sizes", [*SIZES, (0,), (0, 0, 0)], ids=str)
def test_torchs_grouped_product_is_the_loop(sizes, dtype):
    """Which CUDA devices use for bf16; on a CPU it can be called as well. No rows at all are no error."""
    check(BY_TORCH, Groups.of(sizes, CPU), dtype)


@FLOATS
@over_table("sizes", [(2, 2, 2), (5,), (0, 0)], ids=str)
def test_even_groups_are_one_batch(sizes, dtype):
    groups = Groups.even(len(sizes), sizes[0], CPU)
    assert groups.read() == list(sizes)
    assert groups.ends.tolist() == Groups.of(sizes, CPU).ends.tolist()
    check(BATCHED, groups, dtype)


@over_table("left", [0, 3])
@over_table("counts", [(3, 0, 5, 1), (0, 4), (0, 0), (6, 0, 0), (0,)], ids=str)
def test_what_only_the_device_knows(counts, left):
    """Its last group takes what is left: the product of a row without a group would be left unwritten."""
    rows = sum(counts) + left
    groups = Groups.on(torch.tensor(counts), rows)
    sizes = [*counts[:-1], counts[-1] + left]
    assert groups.sizes is None
    assert groups.ends.dtype == torch.int32
    assert groups.read() == sizes
    assert groups.numbers.tolist() == [e for e, size in enumerate(sizes) for _ in range(size)]
    check(BY_TORCH, groups, torch.bfloat16)


@over_table("dtype", [torch.float64, torch.bfloat16], ids=str)
@over_table("sizes", [*SIZES, (0, 0), (2, 2, 2)], ids=str)
def test_biases_of_groups(sizes, dtype):
    """By a loop, by number, and in even blocks: the same bits forward, and sums that agree backward."""
    rows, n = sum(sizes), 5
    y, bias = randn(1, rows, n).to(dtype), randn(2, len(sizes), n).to(dtype)
    number = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    kinds = [Groups.of(sizes, CPU), Groups.on(torch.tensor(sizes), rows)]
    if len(set(sizes)) == 1:
        kinds.append(replace(Groups.even(len(sizes), sizes[0], CPU), sizes=None))
    for groups in kinds:
        own = y.clone()
        add_by_group(own, bias, groups)
        assert torch.equal(own, y + bias[number])
        sums = torch.zeros(len(sizes), n, dtype=torch.float64).index_add_(0, number, y.double())
        assert torch.allclose(sums_by_group(y, groups).double(), sums, rtol=2**-7, atol=2**-7)


def test_a_gpu_is_given_sizes_where_it_has_no_kernel_for_groups(monkeypatch):
    """Torch's own loop would read them at each of six products of a layer."""
    gpu, half, brain = torch.device("cuda"), torch.float16, torch.bfloat16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, reads in (((8, 0), True), ((9, 0), False), ((10, 0), False), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda own=capability: own)
        assert reads_sizes(gpu, brain, (64, 32)) == reads
        assert reads_sizes(gpu, half, (64, 32))
        assert reads_sizes(gpu, brain, (64, 33))
        even = GroupedFacts("cuda", half, aligned=False, even=True)
        assert [table.choose(even).name for table in TABLES] == ["batched"] * 2
