"""The kernel that adds gradients to their sums: torch's bits, for lists of any sizes and addresses."""

import torch

from megazero.ops.gradient_sum import (
    Summand,
    adds_together,
    gradient_sum,
    gradient_sum_cuda,
    gradient_sum_reference,
)
from tests.kernels.harness import DTYPES, in_every_order, same_bits, watched
from tests.kernels.updates import EXTREMES, SIZES, shifted
from tests.tables import over_table

PAIRS = [(dtype, dtype) for dtype in DTYPES] + [(dtype, torch.float32) for dtype in DTYPES[1:]]


def check(summands):
    """The kernel's sums are those of torch's operators, bit for bit."""

    def copies():
        return [Summand(moved(one.total), one.gradient, one.begins) for one in summands]

    def run(kernels):
        own = copies()
        gradient_sum_cuda(own, kernels)
        return [one.total for one in own]

    true = copies()
    gradient_sum_reference(true)
    for ours, theirs in zip(in_every_order(run), true, strict=True):
        assert torch.equal(ours.isnan(), theirs.total.isnan())  # whose bits differ between machines
        assert same_bits(ours.nan_to_num(7.0), theirs.total.nan_to_num(7.0))


def moved(tensor):
    return shifted(tensor, tensor.data_ptr() % 16 // tensor.element_size())


@over_table("dtypes", PAIRS, ids=str)
@over_table("apart", [False, True])
def test_sums_are_those_of_torch(dtypes, apart):
    """Of every remainder, more than fit a launch, begun and gone on with by turns, at places apart or not."""
    g = torch.Generator().manual_seed(3)
    summands = []
    for number, size in enumerate((*SIZES, *range(1, 60))):
        total, gradient = (torch.randn(size, generator=g).to(dtype) for dtype in reversed(dtypes))
        total = shifted(total, number % 4)
        gradient = shifted(gradient, (number + apart) % 4)
        summands.append(Summand(total, gradient, begins=number % 3 == 0))
    check(summands)


@over_table("dtypes", PAIRS, ids=str)
def test_extremes(dtypes):
    values = torch.tensor(EXTREMES)
    gradient, total = values.repeat(len(values)).to(dtypes[0]), values.repeat_interleave(len(values))
    for begins in (False, True):
        check([Summand(total.to(dtypes[1]), gradient, begins)])


@over_table("dtypes", PAIRS, ids=str)
def test_any_shapes_in_one_call(dtypes):
    shapes = [(3, 5), (2, 3, 1), (7,)]
    check([Summand(torch.ones(s).to(dtypes[1]), torch.full(s, 2.0).to(dtypes[0]), False) for s in shapes])


@over_table("dtypes", [(torch.float64, torch.float64), *PAIRS], ids=str)
def test_mixed_gradients_are_each_added_to_their_sums(dtypes):
    summands = [
        Summand(torch.ones(2, 3), torch.full((2, 3), 2.0), begins=True),
        Summand(torch.ones(4).to(dtypes[1]), torch.full((4,), 2.0).to(dtypes[0]), begins=False),
        Summand(torch.ones(3, 2).t(), torch.full((2, 3), 2.0), begins=False),
    ]
    gradient_sum(summands)
    assert [float(one.total.sum()) for one in summands] == [12, 12, 18]


def test_nothing_is_launched_for_nothing():
    library = watched()
    gradient_sum_cuda([Summand(torch.ones(0), torch.ones(0), begins=True)], library)
    assert library.report().kernels == {}


def test_on_the_host_each_is_added_at_once():
    assert not adds_together("cpu")
