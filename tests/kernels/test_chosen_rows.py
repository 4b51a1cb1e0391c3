"""The choice of rows: copies, so each result is the reference's, bit for bit."""

import torch

from megazero.ops.chosen_rows import chosen_rows_cuda
from tests.kernels.harness import DTYPES, in_every_order
from tests.kernels.sweep import check, chosen_rows, with_inputs
from tests.tables import over_table

SPECIAL = (torch.inf, -torch.inf, torch.nan, 65504.0, -0.0, 2.0**-149)


@over_table("dtype", DTYPES, ids=str)
@over_table("rows", [(0, 3, 0), (3, 0, 0), (70, 90, 60), (9, 9, 9), (1, 300, 1)])
def test_numbers_of_rows(rows, dtype):
    check(chosen_rows(rows, 8, dtype))


@over_table("dtype", DTYPES, ids=str)
@over_table("value", SPECIAL)
def test_all_kinds_of_numbers(dtype, value):
    trial = chosen_rows((5, 7, 3), 9, dtype)
    source, otherwise = (each.clone() for each in trial.inputs)
    source.view(-1)[::5], otherwise.view(-1)[::7] = value, value
    check(with_inputs(trial, source, otherwise))


@over_table("dtype", DTYPES, ids=str)
def test_every_second_channel(dtype):
    trial = chosen_rows((5, 6, 4), 32, dtype)
    check(with_inputs(trial, *(each[:, ::2] for each in trial.inputs)))


@over_table("dtype", DTYPES, ids=str)
def test_a_number_that_no_row_has_gives_nan_and_reads_nothing(dtype):
    source, numbers = torch.ones(3, 5, dtype=dtype), torch.tensor([2, 3, -1, 2**62])
    (out,) = in_every_order(
        lambda kernels: [chosen_rows_cuda(source, numbers, torch.tensor([-1, -1, 0]), None, kernels)]
    )
    assert out.isnan().all(1).tolist() == [False, True, False, True]
    assert out[0].tolist() == [1.0] * 5
    assert out[2].tolist() == [0.0] * 5
