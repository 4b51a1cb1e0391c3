"""What routers add to the loss terms: values worked out by hand, and their gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megazero.loss import LossTerm
from megazero.moe.losses import RouterSums, router_terms, terms_of
from megazero.moe.router import Routing
from megazero.spec.resolve import router_spec
from tests.moe.samples import config, laid_out, on_ranks, randn, tokens

# Two sequences, of three tokens and of one: their probabilities, and the experts they chose.
TABLE = [[(0.75, 0.25), (0.5, 0.5), (0.25, 0.75)], [(0.1, 0.9)]]
CHOSEN = [[0, 0, 1], [1]]
ALL_KINDS = {
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss"),
    "moe_aux_loss_coeff": (0.1, 0.2, 0.3),
    "moe_z_loss_coeff": 0.4,
}
NAMES = ("load_balancing", "seq_load_balancing", "global_load_balancing")
TOP1 = {"num_experts": (2,), "moe_router_topk": 1, "moe_router_pre_softmax": True}


def table(columns: int | None = None, blank: tuple[float, float] = (0.9, 0.1)) -> Routing:
    """The choice of the table, with the same numbers in all rows that hold no token."""
    probabilities = torch.tensor(laid_out(TABLE, columns, blank))
    chosen = torch.tensor(laid_out(CHOSEN, columns, 1)).unsqueeze(1)
    return Routing(chosen, torch.ones(chosen.shape), probabilities, probabilities.log() + math.log(2))


def sums(columns: int | None = None, load: Tensor | None = None, layers: int = 1, **own) -> RouterSums:
    model = config(**{**TOP1, **ALL_KINDS, **own})
    return router_terms(router_spec(model), table(columns), tokens([3, 1], columns), None, load, layers)


def test_balance_losses_by_hand():
    """Sequence by sequence: counts (2, 1) and (0, 1), probabilities summed (1.5, 1.5) and (0.1, 0.9)."""
    found = sums().terms
    first, second = 2 / 9 * (2 * 1.5 + 1 * 1.5), 2 / 1 * 0.9
    assert found["seq_load_balancing"].item() == pytest.approx(first + second)
    assert first == pytest.approx(1.0)
    # Together: counts (2, 2) and (1.6, 2.4), of four tokens.
    assert found["load_balancing"].item() == pytest.approx(2 / 16 * (2 * 1.6 + 2 * 2.4))
    # Before the first step is over, its shares are taken as even: one for each token.
    assert found["global_load_balancing"].item() == pytest.approx(4.0)
    uneven = sums(load=torch.tensor([0.75, 0.25])).terms
    assert uneven["global_load_balancing"].item() == pytest.approx(2 * (0.75 * 1.6 + 0.25 * 2.4))
    assert uneven["load_balancing"] == found["load_balancing"]


def test_even_loads_give_one_and_one_expert_for_all_gives_their_number():
    """Divided by what they are over: the scale that Switch Transformers gave the loss."""
    even = torch.full((8, 4), 0.25)
    chosen = torch.arange(8).unsqueeze(1) % 4
    pointed = torch.tensor([[1.0, 0, 0, 0]]).expand(8, 4)
    for p, e, expected in ((even, chosen, 1.0), (pointed, torch.zeros_like(chosen), 4.0)):
        found = router_terms(
            router_spec(config(**{**TOP1, **ALL_KINDS, "num_experts": (4,)})),
            Routing(e, torch.ones(8, 1), p, p),
            tokens([4, 4]),
            None,
            p.mean(0),
            1,
        ).terms
        assert [found[name].item() for name in NAMES] == pytest.approx([expected, 2 * expected, 8 * expected])


def test_a_choice_of_two_counts_half_for_each():
    """One token, probabilities (0.5, 0.3, 0.2), experts 0 and 1: 3 / (2 * 1) * (0.5 + 0.3)."""
    p = torch.tensor([[0.5, 0.3, 0.2]])
    one = Routing(torch.tensor([[0, 1]]), torch.ones(1, 2), p, p.log())
    model = config(num_experts=(3,), **ALL_KINDS)
    found = router_terms(router_spec(model), one, tokens([1]), None, None, 1)
    assert found.terms["seq_load_balancing"].item() == pytest.approx(1.2)
    assert found.terms["load_balancing"].item() == pytest.approx(1.2)
    assert found.tokens.tolist() == [1, 1, 0]


def test_z_loss_and_entropy_by_hand():
    """The logits are logs of the probabilities, and ln 2 more: their logsumexp is ln 2 for each token."""
    found = sums(layers=4).terms
    assert found["z"].item() == pytest.approx(4 * math.log(2) ** 2)
    each = [-(p * math.log(p) + q * math.log(q)) for sequence in TABLE for p, q in sequence]
    assert found["router_entropy"].item() == pytest.approx(sum(each) / 4), "a mean over the four layers"


def test_the_share_of_dropped_choices_by_hand():
    model = config(moe_expert_capacity_factor=1.0, num_experts=(3,))
    p = torch.full((4, 3), 1 / 3)
    chosen = torch.tensor([[0, 1], [1, 2], [0, 2], [2, 1]])
    kept = torch.tensor([[True, False], [True, True], [False, False], [False, False]])
    own = tokens([3, 1])  # in the order of columns: the rows of padding are those of the second sequence
    rows = [0, 3, 1, 0, 2, 0]
    one = Routing(chosen[rows], torch.ones(6, 2), p[0].expand(6, 3), p[0].expand(6, 3))
    found = router_terms(router_spec(model), one, own, kept[rows], None, 1)
    assert found.terms["dropped_tokens"].item() == pytest.approx(5 / 2), "five choices of two for each token"
    assert found.tokens.tolist() == [2, 3, 3], "choices count before any is dropped"
    none = router_terms(router_spec(model), one, own, None, None, 2)
    assert none.terms["dropped_tokens"].item() == 0


def test_padding_changes_nothing():
    plain, wide = sums(), sums(columns=7)
    assert wide.tokens.tolist() == plain.tokens.tolist() == [2, 2]
    assert wide.terms.keys() == plain.terms.keys() == {*NAMES, "z", "router_entropy"}
    for name, value in plain.terms.items():
        assert wide.terms[name].item() == pytest.approx(value.item(), rel=1e-6)


def test_sequences_add_up():
    """So neither the size of a micro-batch nor accumulation changes the sum; per micro-batch it does."""
    whole = sums()
    parts = []
    for number, count in enumerate((3, 1)):
        rows = [number + 2 * i for i in range(count)]
        one = table()
        part = Routing(*(getattr(one, f)[rows] for f in ("experts", "weights", "probabilities", "logits")))
        parts.append(
            router_terms(router_spec(config(**TOP1, **ALL_KINDS)), part, tokens([count]), None, None, 1)
        )
    for name in (*NAMES[1:], "z", "router_entropy"):
        assert sum(p.terms[name].item() for p in parts) == pytest.approx(whole.terms[name].item())
    assert parts[0].terms["load_balancing"].item() == pytest.approx(1.0)
    assert parts[1].terms["load_balancing"].item() == pytest.approx(1.8)


@pytest.mark.parametrize("columns", [4, 6])
def test_gradients_are_the_derivatives(columns):
    """In fp64 by finite differences, with rows that hold no token."""
    own = tokens([4, 2, 1], columns)
    chosen = torch.stack([randn(i, 5).argsort()[:2] for i in range(own.count)])
    model = config(num_experts=(5,), **ALL_KINDS)
    load = torch.tensor([0.1, 0.3, 0.2, 0.25, 0.15], dtype=torch.float64)

    def trained(logits: Tensor) -> tuple[Tensor, ...]:
        one = Routing(chosen, torch.ones(chosen.shape), logits.softmax(1), logits)
        terms = router_terms(router_spec(model), one, own, None, load, 2).terms
        return tuple(terms[name] for name in (*NAMES, "z"))

    logits = randn(9, own.count, 5).requires_grad_()
    assert torch.autograd.gradcheck(trained, logits)
    for value in trained(logits):
        (grad,) = torch.autograd.grad(value, logits, retain_graph=True)
        moved = grad.abs().amax(1) > 1e-6
        assert moved.tolist() == (own.real if own.real is not None else torch.ones(own.count)).bool().tolist()


def test_the_gradient_of_the_balance_loss_by_hand():
    """d/dp_te = E c_e / (k L^2): counts are constants."""
    one = table()
    leaf = one.probabilities.clone().requires_grad_()
    found = router_terms(
        router_spec(config(**TOP1, **ALL_KINDS)),
        replace(one, probabilities=leaf),
        tokens([3, 1]),
        None,
        None,
        1,
    )
    (grad,) = torch.autograd.grad(found.terms["seq_load_balancing"], leaf)
    first, second, blank = [4 / 9, 2 / 9], [0.0, 2.0], [0.0, 0.0]
    assert torch.allclose(grad, torch.tensor([first, second, first, blank, first, blank]))


@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_of_the_tokens_give_the_whole_sums_and_their_own_rows_gradients(ranks):
    """Each rank's gradient is of its own tokens, once: so router gradients are to be summed over ranks."""
    columns, k = 8, 2
    p, chosen = (
        randn(4, 2 * columns, 4).softmax(1),
        torch.stack([randn(i, 4).argsort()[:k] for i in range(16)]),
    )

    def work(context):
        own = tokens([8, 5], columns, context.tp)
        leaf = own.own(p).clone().requires_grad_()
        one = Routing(own.own(chosen), torch.ones(own.count, k), leaf, leaf.log())
        found = router_terms(
            router_spec(config(**ALL_KINDS)), one, own, None, torch.tensor([0.4, 0.3, 0.2, 0.1]), 1
        )
        total = sum(found.terms[name] * (i + 1) for i, name in enumerate((*NAMES, "z")))
        (grad,) = torch.autograd.grad(total, leaf)
        return {name: value.item() for name, value in found.terms.items()}, found.tokens, grad

    ((terms, counts, grad),) = on_ranks(work)
    parts = on_ranks(work, ranks, tp=ranks)
    for found, _, _ in parts:
        assert found == pytest.approx(terms, rel=1e-6)
    assert torch.equal(sum(each for _, each, _ in parts), counts)
    assert counts.sum() == 13 * k
    assert torch.allclose(torch.cat([each for _, _, each in parts]), grad)


def test_terms_and_what_they_are_divided_by():
    assert terms_of(router_spec(config(moe_expert_capacity_factor=1.0, **ALL_KINDS))) == (
        LossTerm("load_balancing", 0.1, over="micro_batches"),
        LossTerm("seq_load_balancing", 0.2, over="sequences"),
        LossTerm("global_load_balancing", 0.3, over="tokens"),
        LossTerm("z", 0.4, over="tokens"),
        LossTerm("router_entropy", 0.0, over="tokens"),
        LossTerm("dropped_tokens", 0.0, over="tokens"),
    )
    quiet = config(moe_router_load_balancing_type=("seq_aux_loss",), moe_aux_loss_coeff=(0.0,))
    assert terms_of(router_spec(quiet)) == (LossTerm("router_entropy", 0.0, over="tokens"),)
    assert router_terms(router_spec(quiet), table(), tokens([3, 1]), None, None, 1).terms.keys() == {
        "router_entropy"
    }
