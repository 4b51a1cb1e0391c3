"""The choice for calls on a GPU, by their facts: which kernel, what it is given, and what is never made."""

from __future__ import annotations

import inspect
import itertools
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megazero.config.tree.model import ModelConfig
from megazero.layers.attention import SelfAttention
from megazero.layers.inputs import LayerInputs
from megazero.layers.placement import Placement
from megazero.layers.rows import Rows
from megazero.mpu.context import solo_context
from megazero.ops import attention as front
from megazero.ops.attention import (
    ATTENTION,
    AttentionFacts,
    BiasKind,
    Documents,
    HeadKind,
    MaskKind,
    Pattern,
    Runs,
    attention,
    table,
)
from megazero.ops.attention.call import AttentionCall
from megazero.ops.attention.cuda import attention_cuda
from megazero.ops.attention.kernel import AttentionKernel
from megazero.ops.attention.pattern import ALL, CAUSAL
from megazero.ops.attention.reference import attention_reference
from megazero.ops.attention.varlen import attention_varlen, varlen_arguments, varlen_knows
from megazero.ops.dispatch import FLOATS, everything
from megazero.ops.dropout import AttentionDropout
from megazero.spec.resolve import model_spec
from tests.kernels.harness import watched
from tests.ops.lse import attention_with_lse
from tests.tables import over_table

CPU = torch.device("cpu")
IDS = np.array([[4, 4, 4, 0, 0, 7], [7, 7, -1, -1, -1, -1]], dtype=np.int32)
TORCH_2_10 = frozenset({"query", "is_causal", "return_aux"})
TORCH_2_11 = frozenset({"query", "scale", "window_size", "return_aux"})
TORCH_2_12 = TORCH_2_11 | {"enable_gqa"}


def set_built(monkeypatch, built: bool) -> None:
    monkeypatch.setattr("megazero.ops.cuda._BACKEND", type("Backend", (), {"library": built or None})())


def chosen(monkeypatch, built: bool, **facts) -> str:
    set_built(monkeypatch, built)
    whole = {"dtype": torch.bfloat16, "mask": MaskKind.CAUSAL, "dropout": False, "lse": False, **facts}
    return ATTENTION.choose(AttentionFacts("cuda", **whole)).name


@over_table(
    ("facts", "name"),
    [
        ({}, "sdpa"),
        ({"mask": MaskKind.NONE}, "sdpa"),
        ({"dropout": True}, "cuda"),
        ({"lse": True}, "cuda"),
        ({"mask": MaskKind.WINDOW}, "cuda"),
        ({"mask": MaskKind.DOCUMENTS}, "cuda"),
        ({"mask": MaskKind.DENSE}, "cuda"),
        ({"mask": MaskKind.RUNS}, "varlen"),
        ({"mask": MaskKind.RUNS, "dropout": True}, "cuda"),
        ({"mask": MaskKind.RUNS, "dtype": torch.float32}, "cuda"),
        ({"mask": MaskKind.RUNS, "dtype": torch.float64}, "sdpa"),
        ({"dropout": True, "heads": HeadKind.WIDE}, "composed"),
        ({"dropout": True, "bias": BiasKind.TENSOR}, "composed"),
        ({"lse": True, "heads": HeadKind.UNLIKE}, "reference"),
    ],
)
def test_each_kind_of_call_has_its_kernel(facts, name, monkeypatch):
    assert chosen(monkeypatch, built=True, **facts) == name


@over_table("built", [False, True])
@over_table("device", ["cpu", "cuda", "meta"])
def test_whatever_gives_a_log_sum_exp_is_a_kernel(device, built, monkeypatch):
    """Merging parts of the keys needs both passes, of every kind of call."""
    set_built(monkeypatch, built)
    kinds = itertools.product(FLOATS, MaskKind, (False, True), (True,), BiasKind, HeadKind)
    chosen = {ATTENTION.choose(AttentionFacts(device, *kind)) for kind in kinds}
    assert len(chosen) > 1 or (device == "cuda" and not built)
    assert all(isinstance(row.fn, AttentionKernel) for row in chosen)


@pytest.mark.parametrize("width", [8, 12])
def test_a_plan_makes_values_of_any_width(width):
    """Their results and gradients have the shapes and dtypes that a device's have."""
    given = [
        torch.zeros(shape, dtype=torch.bfloat16) for shape in ((5, 2, 4, 6), (5, 2, 2, 6), (5, 2, 2, width))
    ]
    made = []
    for device in ("cpu", "meta"):
        leaves = [x.to(device).requires_grad_() for x in given]
        results = attention_with_lse(*leaves, causal=True)
        grads = torch.autograd.grad(results, leaves, [torch.zeros_like(x) for x in results])
        made.append([(x.shape, x.dtype) for x in (*results, *grads)])
    assert made[0] == made[1]


def test_without_our_kernels_torchs_run(monkeypatch):
    assert chosen(monkeypatch, built=False, mask=MaskKind.RUNS) == "varlen"
    assert chosen(monkeypatch, built=False, mask=MaskKind.DOCUMENTS) == "sdpa"
    assert chosen(monkeypatch, built=False, dropout=True) == "composed"


def test_the_fact_of_a_call_names_its_mask(monkeypatch):
    seen = []
    table = replace(ATTENTION, implementations=(ATTENTION.implementations[-1],))
    choose = lambda self, facts: seen.append(facts) or table.implementations[0]  # noqa: E731
    monkeypatch.setattr(type(table), "choose", choose)
    x, few = torch.zeros(6, 2, 1, 4), torch.zeros(2, 2, 1, 4)
    known = Documents(torch.from_numpy(IDS), Runs.of(IDS, CPU))
    for q, given in (
        (x, {"causal": True}),
        (few, {"causal": True}),
        (x, {"causal": False, "pattern": Pattern((2, 2))}),
        (x, {"causal": True, "document_ids": known}),
        (x, {"causal": True, "document_ids": known, "pattern": Pattern((2, 0))}),
        (few, {"causal": True, "document_ids": known}),
        (x, {"causal": True, "document_ids": known, "mask": torch.ones(6, 6, dtype=torch.bool)}),
    ):
        attention(q, x, x, **given)
    kinds = ["causal", "window", "window", "runs", "documents", "documents", "dense"]
    assert [facts.mask.value for facts in seen] == kinds


def test_runs_are_where_documents_end():
    runs = Runs.of(IDS, CPU)
    assert runs is not None
    assert runs.ends.tolist() == [0, 3, 5, 6, 8, 12]
    assert runs.ends.dtype == torch.int32
    assert runs.longest == 4
    assert Runs.of(np.array([[1, 1, 2, 1]]), CPU) is None  # a document comes back
    assert Runs.of(np.array([[1, 2], [2, 1]]), CPU) is not None  # in another row it is another document
    assert Runs.of(np.zeros((0, 4)), CPU) is None


def test_bounds_are_where_a_document_begins_and_ends():
    first, stop = Documents(torch.tensor([[4, 4, 4, 0, 0, 7], [7, 7, -1, 7, -1, 2]])).bounds
    assert first.tolist() == [[0, 0, 0, 3, 3, 5], [0, 0, 2, 0, 2, 5]]
    assert stop.tolist() == [[3, 3, 3, 5, 5, 6], [4, 4, 5, 4, 5, 6]]
    assert first.dtype == stop.dtype == torch.int32


def by_run(causal_name: str):
    """torch's function, computed run by run on a CPU: what it is given must be enough."""

    def attend(q, k, v, ends_q, ends_k, longest_q, longest_k, *, scale=None, **given) -> Tensor:
        lengths = ends_q.diff().tolist()
        assert ends_q is ends_k
        assert longest_q == longest_k == max(lengths)
        assert q.shape[-1] % 8 == 0, "FlashAttention refuses it"
        assert q.shape[1] == k.shape[1] or given.pop("enable_gqa")
        causal = given.pop("is_causal") if causal_name == "is_causal" else given.pop("window_size") == (-1, 0)
        assert not given
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        call = AttentionCall(scale, pattern=ALL.causally(causal))
        outs = [attention_reference(*(x.unsqueeze(1) for x in part), call) for part in parts]
        return torch.cat([out.view(len(out), *q.shape[1:]) for out, _ in outs])

    return attend


@over_table("causal", [False, True])
@over_table("size", [8, 12])
@over_table("scale", [8**-0.5, 0.3])
@over_table(("names", "groups"), [(TORCH_2_10, 2), (TORCH_2_11, 2), (TORCH_2_12, 2), (TORCH_2_12, 1)])
def test_torchs_function_of_each_version_gets_what_the_mask_says(names, groups, scale, size, causal):
    torch.manual_seed(1)
    shapes = [(6, 2, n, size) for n in (2, groups, groups)]
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    call = AttentionCall(
        scale, pattern=ALL.causally(causal), documents=Documents(torch.from_numpy(IDS), Runs.of(IDS, CPU))
    )
    attend = by_run("is_causal" if "is_causal" in names else "window_size")
    ours, _ = attention_varlen(*leaves, call, attend, names)
    true, _ = attention_reference(*leaves, call)
    torch.testing.assert_close(ours, true)
    for one, other in zip(*(torch.autograd.grad(x.sin().sum(), leaves) for x in (ours, true)), strict=True):
        torch.testing.assert_close(one, other)


def test_which_versions_know_what():
    versions = (frozenset(), TORCH_2_10, TORCH_2_11, TORCH_2_12)
    assert [varlen_knows(False, names) for names in versions] == [False, True, True, True]
    assert [varlen_knows(True, names) for names in versions] == [False, False, False, True]


def test_this_torchs_function_takes_the_arguments():
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    signature = inspect.signature(varlen.varlen_attn)
    call, names = AttentionCall(0.3, pattern=CAUSAL), frozenset(signature.parameters)
    signature.bind(*range(7), **varlen_arguments(call, varlen_knows(True), names))


class Made(TorchDispatchMode):
    """The operators that ran, each with the shape of a tensor that it made."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        made = (x for x in tree_leaves(results) if isinstance(x, Tensor))
        self.tensors += [(func.overloadpacket.__name__, tuple(x.shape)) for x in made]
        return results

    def of_all_pairs(self) -> list[str]:
        return [name for name, shape in self.tensors if shape[-2:] == (40, 40)]


ROWS = {row.name: row for row in ATTENTION.implementations}


def documents() -> Documents:
    ids = np.arange(80, dtype=np.int32).reshape(2, 40) // 7
    return Documents(torch.from_numpy(ids), Runs.of(ids, CPU))


def two_layers(name: str, function, monkeypatch, dropout: float) -> Made:
    """The tensors of two layers of attention, forward and backward, by one implementation."""
    rows = (replace(ROWS[name], fn=function, serves=everything), ROWS["reference"])
    monkeypatch.setattr(table, "ATTENTION", replace(ATTENTION, implementations=rows))
    monkeypatch.setattr(Documents, "lengths", None)  # as on a GPU, where the host does not read ids
    config = ModelConfig(
        hidden_size=16, num_layers=2, num_attention_heads=2, seq_length=40, attention_dropout=dropout
    )
    placement = Placement.of(solo_context(), torch.float32)
    specs = [layer.attention for layer in model_spec(config).layers]
    layers = [SelfAttention(number, spec, placement) for number, spec in enumerate(specs)]
    inputs = LayerInputs(Rows(range(40), documents(), torch.tensor([3, 4]) if dropout else None))
    with Made() as made:
        x = torch.randn(40, 2, 16, requires_grad=True)
        for layer in layers:
            x, _ = layer(x, inputs)
        x.sum().backward()
    return made


def test_no_tensor_of_all_pairs_is_made(monkeypatch):
    """Neither for varlen, nor by our kernels under dropout; the composition shows that one would be seen."""

    def varlen(q, k, v, call):
        return attention_varlen(q, k, v, call, lambda q, *others, **given: q * 1.0, TORCH_2_12)

    kernels = watched()
    fused = partial(attention_cuda, kernels=kernels)
    assert two_layers("varlen", varlen, monkeypatch, 0.0).of_all_pairs() == []
    assert two_layers("cuda", fused, monkeypatch, 0.1).of_all_pairs() == []
    assert set(kernels.report().kernels) > {"attention_forward", "attention_backward_keys"}
    assert two_layers("composed", ROWS["composed"].fn, monkeypatch, 0.1).of_all_pairs() != []


def test_layers_share_one_mask_of_their_documents(monkeypatch):
    """Ids are compared for the first of two layers alone."""
    made = two_layers("sdpa", ROWS["sdpa"].fn, monkeypatch, 0.0)
    assert made.of_all_pairs().count("eq") == 1


def test_layers_share_the_bounds_of_their_documents(monkeypatch):
    made = two_layers("cuda", partial(attention_cuda, kernels=watched()), monkeypatch, 0.1)
    assert [name for name, _ in made.tensors].count("sort") == 2  # its two results


@over_table(
    ("name", "facts", "warned"),
    [
        ("composed", {"dropout": True}, True),
        ("reference", {"lse": True}, True),
        ("sdpa", {"mask": MaskKind.RUNS}, True),
        ("sdpa", {"bias": BiasKind.TENSOR}, True),
        ("sdpa", {}, False),
        ("cuda", {"mask": MaskKind.DENSE}, False),
        ("varlen", {"mask": MaskKind.RUNS}, False),
    ],
)
def test_a_tensor_of_all_pairs_is_told(name, facts, warned):
    whole = {"mask": MaskKind.CAUSAL, "dropout": False, "lse": False, **facts}
    call = AttentionFacts("cuda", torch.bfloat16, **whole)
    assert front.holds_all_pairs(name, call) == warned
    assert not front.holds_all_pairs(name, replace(call, device="cpu"))


def test_the_warning_says_why(monkeypatch):
    call = AttentionFacts(
        "cuda", torch.bfloat16, MaskKind.CAUSAL, dropout=True, lse=False, bias=BiasKind.TENSOR
    )
    with pytest.warns(UserWarning, match="`composed` .`cuda` serves bias=none only."):
        table._warn_of_all_pairs("composed", call)


def test_varying_shapes_leave_cudnn_out_and_put_it_back():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        with front.varying_shapes():
            assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.cudnn_sdp_enabled()
        with front.varying_shapes(False):
            assert torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)  # by whoever calls us
        with front.varying_shapes(False):
            assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_dropout_by_documents_on_a_gpu_is_that_of_a_cpu():
    """The same call by the kernels and by the formula, through the front's own value of a call."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(40, 2, n, 8) for n in (4, 2, 2))
    dropout = AttentionDropout(0.2, torch.tensor([7, 8]), range(40), range(40))
    call = AttentionCall(0.3, pattern=CAUSAL, documents=documents(), dropout=dropout)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours, lse = attention_cuda(q, k, v, call, kernels=watched())
    true, true_lse = attention_reference(q, k, v, call)
    torch.testing.assert_close(ours, true, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, true_lse, rtol=1e-4, atol=1e-5)
