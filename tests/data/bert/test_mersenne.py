from __future__ import annotations

from itertools import islice

from megazero.data.bert.sample_map import mersenne_64


def test_it_is_the_generator_of_the_cpp_standard():
    """[rand.predef] asks for the 10,000th number of the default seed."""
    numbers = list(islice(mersenne_64(5489), 10_000))
    assert numbers[0] == 14514284786278117030
    assert numbers[-1] == 9981545732273789042


def test_seeds_count_modulo_2_64():
    assert next(mersenne_64(1 << 64)) == next(mersenne_64(0))
