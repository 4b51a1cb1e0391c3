"""Products and activations whose rows do not depend on each other, to the last bit."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F

from megazero.errors import ConfigError
from megazero.inference.invariant import OrderedProduct, _ordered, _Steady, make_invariant
from megazero.inference.staged import StagedModel
from megazero.mpu.context import thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.ops import native
from megazero.ops.bias_gelu import bias_gelu
from megazero.ops.grouped_linear import Groups, grouped_linear
from megazero.ops.layer_norm import layer_norm
from megazero.ops.rms_norm import rms_norm
from megazero.ops.swiglu import swiglu
from megazero.train.parts.chunks import build_chunks
from megazero.train.parts.vocabulary import Vocabulary
from tests.layouts.layout import VOCABULARY, Layout
from tests.tables import over_table

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled kernels are not built")


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def whole_and_parts(function, x: torch.Tensor) -> None:
    """Every run of rows has the bits that it has among all rows."""
    every = function(x)
    for count in range(1, len(x) + 1):
        assert torch.equal(function(x[:count].clone()), every[:count])
        assert torch.equal(function(x[-count:].clone()), every[-count:])


@over_table("sizes", [(512, 48), (33, 16), (7, 5), (400, 1), (1, 130)], ids=str)
@over_table("dtype", [torch.float32, torch.bfloat16], ids=str)
@over_table("threads", [1, 2])
def test_a_row_of_a_product_has_the_same_bits_among_any_rows(sizes, dtype, threads):
    depth, width = sizes
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        product, weight, bias = OrderedProduct(), drawn(width, depth).to(dtype), drawn(width).to(dtype)
        x = drawn(70, depth).to(dtype)
        with torch.inference_mode():
            whole_and_parts(lambda rows: product(rows, weight, bias), x)
            expected = F.linear(x.double(), weight.double(), bias.double())
            bound = 1e-5 if dtype == torch.float32 else 2e-2
            assert torch.allclose(product(x, weight, bias).double(), expected, rtol=bound, atol=40 * bound)
    finally:
        torch.set_num_threads(before)


def test_rows_of_a_long_product_have_the_same_bits_wherever_its_blocks_end():
    """Rows are computed 192 at a time, and depth in blocks of like sizes up to 512."""
    product, weight, x = OrderedProduct(), drawn(20, 1100), drawn(400, 1100)
    with torch.inference_mode():
        every = product(x, weight, None)
        for start, stop in ((0, 1), (0, 192), (100, 300), (190, 194), (191, 400), (399, 400)):
            assert torch.equal(product(x[start:stop].clone(), weight, None), every[start:stop])
    assert torch.allclose(every.double(), x.double() @ weight.double().t(), atol=2e-4)


@over_table("name", ["BASELINE", "AVX2", "AVX512"])
def test_every_instruction_set_sums_in_order(name):
    """On integers all are exact; what a processor lacks falls back."""
    x, weight = (drawn(11, 500) * 4).round(), (drawn(37, 500) * 4).round()
    panels, y = torch.empty(3, 500, 16), torch.empty(11, 37)
    native.NATIVE.pack_weight(37, 500, 500, False, weight.data_ptr(), panels.data_ptr())
    most = getattr(native.NATIVE.InstructionSet, name)
    native.NATIVE.ordered_linear(11, 37, 500, 1, x.data_ptr(), panels.data_ptr(), 0, y.data_ptr(), most)
    assert torch.equal(y, x @ weight.t())


def test_gradients_are_those_of_the_ordinary_product():
    leaves = [drawn(5, 3, 20).requires_grad_(), drawn(9, 20).requires_grad_(), drawn(9).requires_grad_()]
    product = OrderedProduct()
    own = torch.autograd.grad(product(*leaves).sin().sum(), leaves)
    for one, other in zip(own, torch.autograd.grad(F.linear(*leaves).sin().sum(), leaves), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_changed_weight_is_packed_anew():
    product, weight, x = OrderedProduct(), drawn(8, 6), drawn(2, 6)
    with torch.inference_mode():
        before = product(x, weight, None)
        weight.mul_(2)
        assert torch.equal(product(x, weight, None), 2 * before)
        kept = len(product._packed)
        weight.numpy()[:] *= 2  # torch does not see this, as it does not see the optimizers' kernels
        assert torch.equal(product(x, weight, None), 2 * before)
    assert torch.equal(product(x, weight, None), 4 * before)
    assert len(product._packed) == kept == 1


def test_a_weight_that_is_gone_leaves_nothing():
    product = OrderedProduct()
    for _ in range(3):
        product(drawn(2, 6), drawn(8, 6), None)
    assert len(product._packed) == 1


def test_rows_of_groups_are_products_of_their_own():
    product, weight, groups = OrderedProduct(), drawn(3, 8, 6), Groups.of([2, 0, 5], torch.device("cpu"))
    x = drawn(7, 6)
    own = product.grouped(x, weight, groups)
    assert torch.allclose(own, grouped_linear(x, weight, groups), atol=1e-5)
    assert torch.equal(own[2:], product(x[2:], weight[2], None))


@over_table("width", [1, 5, 8, 24])
def test_other_rows_change_no_bit_of_what_is_not_a_product(width):
    x, gates = drawn(70, width) * 3, drawn(70, 2 * width) * 3
    weight, bias = drawn(width), drawn(width)
    functions = {
        "gelu": (lambda rows: bias_gelu(rows, None, False, None), x),
        "swiglu": (lambda rows: swiglu(rows.unflatten(-1, (2, -1))), gates),
        "layer norm": (lambda rows: layer_norm(rows, weight, bias, 1e-5), x),
        "rms norm": (lambda rows: rms_norm(rows, weight, 1e-5), x),
        "softmax": (lambda rows: rows.log_softmax(-1), x),
    }
    with torch.no_grad():
        for function, given in functions.values():
            whole_and_parts(function, given)
        with _Steady():
            for function in (torch.sigmoid, F.gelu, lambda rows: F.gelu(rows, approximate="tanh")):
                whole_and_parts(function, x)
            assert torch.allclose(F.gelu(x, approximate="tanh"), bias_gelu(x, None, False, None), atol=1e-6)
            assert torch.allclose(F.gelu(x), bias_gelu(x, None, True, None), atol=1e-6)


@pytest.mark.gloo
def test_sums_over_ranks_are_in_order_wherever_an_element_is(pool):
    """Gloo's ring adds in an order that depends on the place; there, equal rows have different sums."""
    assert pool.run(_sums_of_equal_rows, 3) == [[True, True]] * 3


def _sums_of_equal_rows(rank: int, world_size: int) -> list[bool]:
    """Whether all rows of sums are alike, where a rank's rows are."""
    from megazero.mpu.torch_group import open_group

    group = _ordered(open_group("world", rank, tuple(range(world_size)), timedelta(seconds=30)))
    x = drawn(1, 33 + rank)[:, :33].repeat(12, 1)
    total, part = x.clone(), torch.empty(4, 33)
    group.all_reduce(total).wait()
    group.reduce_scatter(part, x).wait()
    return [bool((total == total[0]).all()), torch.equal(part, total[:4])]


def test_what_cannot_be_invariant_is_refused():
    context = thread_context(ThreadWorld(1), Layout().grid, 0)
    for layout, message in (
        (Layout(shape="llama", variant="gemma"), "`softcap` of attention must be unset"),
        (Layout(dtype="fp16"), "must be in fp32 or bf16 on a CPU .* but is in float16 on cpu"),
    ):
        vocabulary = Vocabulary(VOCABULARY, 64, None, None)
        (chunk,) = build_chunks(layout.config(), vocabulary, context, torch.device("cpu")).values()
        with pytest.raises(ConfigError, match=message):
            make_invariant(StagedModel.whole(chunk))
