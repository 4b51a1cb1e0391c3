"""The scan by chunks and the convolution against the recurrence that they compute, row by row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.layers.state_space.convolution import WIDTH, causal_convolution
from megazero.layers.state_space.scan import selective_scan
from megazero.ops.attention import Documents
from tests.tables import over_table

B, G, R, P, N = 2, 3, 2, 4, 5
CHUNK = 8


def recurrence(x, dt, a, b, c, state, segments=None):
    rows = []
    for t in range(len(x)):
        if segments is not None and t > 0:
            stays = segments[:, t] == segments[:, t - 1]
            state = state * stays.to(x.dtype)[:, None, None, None, None]
        write = (dt[t][..., None] * x[t])[..., None] * b[t][:, :, None, None, :]
        state = state * (dt[t] * a).exp()[..., None, None] + write
        rows.append((state * c[t][:, :, None, None, :]).sum(-1))
    return torch.stack(rows), state


def inputs(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(length)
    x, dt = torch.randn(length, B, G, R, P), torch.rand(length, B, G, R) * 2
    a = -torch.rand(G, R) * 4
    b, c = torch.randn(2, length, B, G, N)
    return [t.to(dtype).requires_grad_() for t in (x, dt, a, b, c, torch.randn(B, G, R, P, N))]


def segments(length: int) -> Tensor:
    """Ends in the middle of chunks, at their edges, and two in one."""
    ends = torch.zeros(B, length, dtype=torch.int64)
    ends[0, 3::5] = 1
    ends[1, 8::8] = 1
    return ends.cumsum(1)


@over_table("cut", [False, True], ids=["whole", "documents"])
@over_table("length", [1, 7, 8, 9, 16, 29])
def test_chunks_equal_the_recurrence(length, cut):
    given, ends = inputs(length), segments(length) if cut else None
    y, state = selective_scan(*given, ends, chunk=CHUNK)
    wanted, last = recurrence(*given, ends)
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(y), torch.randn_like(state)

    def gradients(y: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((y * weights[0]).sum() + (state * weights[1]).sum(), given)

    for got, want in zip(gradients(y, state), gradients(wanted, last), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@over_table("chunk", [1, 3, 8, 64])
def test_the_size_of_chunks_changes_nothing(chunk):
    *given, _ = inputs(21)
    y, state = selective_scan(*given, chunk=chunk)
    wanted, last = recurrence(*given, torch.zeros(B, G, R, P, N, dtype=torch.float64))
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(state, last)


def test_a_scan_goes_on_where_another_ended():
    x, dt, a, b, c, state = inputs(20)
    whole, last = selective_scan(x, dt, a, b, c, state, chunk=CHUNK)
    rows = []
    for part in (slice(0, 5), slice(5, 6), slice(6, 20)):
        y, state = selective_scan(x[part], dt[part], a, b[part], c[part], state, chunk=CHUNK)
        rows.append(y)
    torch.testing.assert_close(torch.cat(rows), whole)
    torch.testing.assert_close(state, last)


def test_rates_that_forget_at_once_leave_numbers():
    """exp of what a row would have grown by since a later one must not be taken: it overflows."""
    x, dt, a, b, c, _ = (t.detach().float().requires_grad_() for t in inputs(24))
    y, _ = selective_scan(x, dt * 100, a * 100, b, c, chunk=CHUNK)
    y.sum().backward()
    assert all(t.grad.isfinite().all() for t in (x, dt, a, b, c))
    wanted, _ = recurrence(x, dt * 100, a * 100, b, c, torch.zeros(B, G, R, P, N))
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)


def test_half_precision_is_scanned_in_fp32():
    wide = [t.detach() for t in inputs(19, torch.float32)]
    narrow = [t.bfloat16() for t in wide]
    y, state = selective_scan(*narrow, chunk=CHUNK)
    wanted, last = selective_scan(*(t.float() for t in narrow), chunk=CHUNK)
    assert y.dtype == state.dtype == torch.float32
    torch.testing.assert_close((y, state), (wanted, last), rtol=0, atol=0)


@over_table("length", [1, 2, 3, 11])
def test_the_convolution_equals_torchs(length):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(length, B, G, P), torch.randn(G, P, WIDTH), torch.randn(G, P)
    y, kept = causal_convolution(x, weight, bias)
    padded = F.pad(x.permute(1, 2, 3, 0).flatten(1, 2), (WIDTH - 1, 0))
    wanted = F.conv1d(padded, weight.flatten(0, 1).unsqueeze(1), bias.flatten(), groups=G * P)
    torch.testing.assert_close(y.permute(1, 2, 3, 0).flatten(1, 2), wanted)
    torch.testing.assert_close(kept.permute(1, 2, 3, 0).flatten(1, 2), padded[..., length:])


def test_a_convolution_goes_on_where_another_ended():
    torch.manual_seed(1)
    x, weight, bias = torch.randn(9, B, G, P), torch.randn(G, P, WIDTH), torch.randn(G, P)
    whole, _ = causal_convolution(x, weight, bias)
    first, kept = causal_convolution(x[:2], weight, bias)
    second, kept = causal_convolution(x[2:3], weight, bias, kept)
    third, _ = causal_convolution(x[3:], weight, bias, kept)
    torch.testing.assert_close(torch.cat((first, second, third)), whole)


def test_a_convolution_sees_its_document_alone():
    torch.manual_seed(2)
    x, weight, bias = torch.randn(10, B, G, P), torch.randn(G, P, WIDTH), torch.randn(G, P)
    ends = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 2, 3, 3], [0] * 10])
    y, _ = causal_convolution(x, weight, bias, segments=ends)
    for rows in (slice(0, 2), slice(2, 7), slice(7, 8), slice(8, 10)):
        alone, _ = causal_convolution(x[rows, :1], weight, bias)
        torch.testing.assert_close(y[rows, :1], alone)
    torch.testing.assert_close(y[:, 1:], causal_convolution(x[:, 1:], weight, bias)[0])


def test_segments_are_numbered_by_where_ids_change():
    ids = torch.tensor([[4, 4, 2, 2, -1], [7, 7, 7, 7, 7], [1, 2, 1, 1, 2]])
    expected = [[0, 0, 1, 1, 2], [0, 0, 0, 0, 0], [0, 1, 2, 2, 3]]
    documents = Documents(ids)
    assert documents.run_numbers.tolist() == expected
    assert documents.run_numbers is documents.run_numbers  # once for all layers
