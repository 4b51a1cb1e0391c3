"""What each filter leaves, literally; what is drawn, as a law."""

from __future__ import annotations

import math

import pytest
import torch

from megazero.errors import ConfigError, NumericsError
from megazero.inference.sampling import (
    Sampling,
    choose_tokens,
    invert_cdf,
    keep_top_k,
    keep_top_p,
    probabilities,
    token_uniforms,
)
from tests.tables import over_table

NO = -math.inf


def logs(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).log()


@over_table(
    ("k", "expected"),
    [(1, [NO, 3.0, NO, NO]), (2, [2.0, 3.0, NO, NO]), (3, [2.0, 3.0, 2.0, NO]), (4, [2.0, 3.0, 2.0, -1.0])],
)
def test_top_k_keeps_exactly_k_and_the_smaller_id_of_equals(k, expected):
    assert keep_top_k(torch.tensor([[2.0, 3.0, 2.0, -1.0]]), k).tolist() == [expected]


@over_table(
    ("p", "kept"),
    [(1e-9, [2]), (0.45, [2]), (0.55, [0, 2]), (0.79, [0, 2]), (0.81, [0, 2, 3]), (0.96, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_fewest_that_reach_the_mass(p, kept):
    scores = logs([0.3, 0.05, 0.5, 0.15])
    left = keep_top_p(scores, p)
    assert left[0].isfinite().nonzero().flatten().tolist() == kept
    assert torch.equal(left[0, kept], scores[0, kept])


@over_table(("p", "kept"), [(0.25, 1), (0.5, 2), (0.75, 3)])
def test_top_p_stops_where_the_mass_is_reached_exactly(p, kept):
    """As transformers does: what is enough without a token needs no further one."""
    left = keep_top_p(torch.zeros(1, 4), p)
    assert left[0].isfinite().tolist() == [True] * kept + [False] * (4 - kept)


@over_table("p", [0.2, 0.9, 0.999])
def test_a_nucleus_among_the_likeliest_is_that_of_all_tokens(p):
    """Flat rows have nuclei of more than the 1,024 tokens that are sorted first, or end amid equal scores."""
    scores = torch.randn(6, 3000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    scores *= torch.tensor([[0.0], [0.1], [1.0], [3.0], [9.0], [3.0]])
    scores[5] = scores[5].round()
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    mass = ranked.softmax(-1)
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, mass.cumsum(-1) - mass < p)
    left = keep_top_p(scores, p).isfinite()
    assert (left != kept).sum(-1).le(1).all()  # a rounding may move one token
    assert torch.equal(left[2:], torch.cat([keep_top_p(row, p).isfinite() for row in scores[2:].split(1)]))


@over_table(("p", "kept"), [(0.0, 4), (0.05, 4), (0.2, 3), (0.5, 2), (1.0, 1)])
def test_min_p_keeps_what_has_its_share_of_the_likeliest(p, kept):
    left = probabilities(logs([0.5, 0.3, 0.15, 0.05]), Sampling(min_p=p))
    assert (left > 0).sum() == kept


def test_rows_are_filtered_each_by_themselves():
    left = keep_top_p(logs([0.7, 0.2, 0.1], [0.1, 0.45, 0.45]), 0.6)
    assert left.isfinite().tolist() == [[True, False, False], [False, True, True]]


@over_table(
    ("sampling", "expected"),
    [
        (Sampling(), [0.4, 0.1, 0.3, 0.2]),
        (Sampling(temperature=0.5), [16 / 30, 1 / 30, 9 / 30, 4 / 30]),
        (Sampling(top_k=3), [4 / 9, 0, 3 / 9, 2 / 9]),
        (Sampling(top_k=9), [0.4, 0.1, 0.3, 0.2]),
        (Sampling(top_p=0.65), [4 / 7, 0, 3 / 7, 0]),
        # 4/9 + 3/9 = 0.78 of what top-k left; without top-k it would be 0.7 and a third token stays.
        (Sampling(top_k=3, top_p=0.75), [4 / 7, 0, 3 / 7, 0]),
        (Sampling(top_p=0.75), [4 / 9, 0, 3 / 9, 2 / 9]),
        # Temperature comes first: squared, the first two hold 25/30.
        (Sampling(temperature=0.5, top_p=0.8), [16 / 25, 0, 9 / 25, 0]),
    ],
)
def test_temperature_then_top_k_then_top_p(sampling, expected):
    probs = probabilities(logs([0.4, 0.1, 0.3, 0.2]), sampling)
    assert probs.dtype == torch.float64
    assert probs[0].tolist() == pytest.approx(expected, abs=1e-7)


@over_table("temperature", [1e-3, 1e-12, 5e-324])
def test_temperature_towards_zero_is_greedy(temperature):
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(3))
    numbers = range(64)
    cold = choose_tokens(logits, Sampling(temperature=temperature), numbers, 4)
    assert torch.equal(cold, choose_tokens(logits, Sampling(greedy=True), numbers, 4))
    assert torch.equal(cold, logits.argmax(-1))


def test_greedy_takes_the_smallest_of_equal_ids():
    assert choose_tokens(torch.tensor([[1.0, 2.0, 2.0]]), Sampling(greedy=True), [0], 0).tolist() == [1]


def test_inverse_of_the_distribution_function():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]]).double().expand(6, -1)
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-24])
    assert invert_cdf(probs, uniforms).tolist() == [1, 1, 3, 3, 4, 4]


def test_a_row_that_sums_to_less_than_1_is_scaled():
    """Rounding makes such rows, where a number close to 1 must not fall behind the last token."""
    probs = torch.tensor([[0.25, 0.25, 0.0]]).expand(4, -1)
    assert invert_cdf(probs, torch.tensor([0.0, 0.49, 0.5, 0.99])).tolist() == [0, 0, 1, 1]


def test_draws_follow_the_distribution():
    n, probs = 20_000, torch.tensor([0.5, 0.3, 0.15, 0.05])
    drawn = choose_tokens(probs.log().expand(n, -1), Sampling(seed=11), range(n), 5)
    share = drawn.bincount(minlength=4) / n
    # Five standard deviations.
    assert torch.all((share - probs).abs() < 5 * (probs * (1 - probs) / n).sqrt())


def test_a_number_depends_on_seed_sequence_and_position_alone():
    here = token_uniforms(3, [4, 9], 20, "cpu")
    assert torch.equal(here[1:], token_uniforms(3, [9], 20, "cpu"))
    others = [token_uniforms(4, [9], 20, "cpu"), token_uniforms(3, [9], 21, "cpu"), here[:1]]
    assert all(not torch.equal(here[1:], other) for other in others)


def test_only_the_allowed_vocabulary_is_drawn():
    logits = torch.tensor([[0.0, 1.0, 50.0]]).expand(200, -1)
    sampled = choose_tokens(logits, Sampling(vocab_size=2), range(200), 0)
    assert set(sampled.tolist()) == {0, 1}
    assert choose_tokens(logits[:1], Sampling(vocab_size=2, greedy=True), [0], 0).tolist() == [1]


@over_table("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused(bad):
    logits = torch.zeros(2, 3)
    logits[1, 2] = bad
    with pytest.raises(NumericsError, match="position 8 of sequence 6"):
        choose_tokens(logits, Sampling(), [5, 6], 8)


@over_table(
    ("fields", "message"),
    [
        ({"temperature": 0.0}, "`temperature` must be positive and finite, but is 0.0; set `greedy`"),
        ({"temperature": -1.0}, "`temperature` must be positive"),
        ({"temperature": math.nan}, "`temperature` must be positive"),
        ({"temperature": math.inf}, "`temperature` must be positive"),
        ({"top_k": -1}, "`top_k` must be at least 0, but is -1"),
        ({"top_p": 0.0}, "`top_p` must be in"),
        ({"top_p": 1.01}, "`top_p` must be in"),
        ({"top_p": math.nan}, "`top_p` must be in"),
        ({"vocab_size": 0}, "`vocab_size` must be at least 1"),
    ],
)
def test_values_out_of_range_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**fields)


def test_all_violations_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        Sampling(temperature=0, top_k=-2, top_p=2)
    assert len(caught.value.violations) == 3
