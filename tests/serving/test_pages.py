"""Who holds which page, and what a page is remembered for."""

from __future__ import annotations

import random

import pytest

from megazero.serving.pages import PagePool, PageTable

PAGE = 4


def filled(pool: PagePool, tokens: list[int], salt: str = "") -> PageTable:
    """The table of a sequence whose tokens are all computed."""
    table = PageTable(salt)
    adopted = pool.adopt(table, tokens)
    assert pool.extend(table, len(tokens)) is not None
    assert adopted < len(tokens)
    pool.publish(table, tokens, len(tokens))
    return table


def test_full_pages_of_an_equal_beginning_are_shared_and_the_rest_is_not():
    pool = PagePool(8, PAGE)
    first = filled(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    second, third = PageTable(""), PageTable("")
    assert pool.adopt(second, [1, 2, 3, 4, 5, 6, 7, 8, 1]) == 8
    assert pool.adopt(third, [1, 2, 3, 4, 5, 6, 0, 8, 1]) == 4
    assert second.pages == first.pages[:2]
    assert third.pages == first.pages[:1]
    pool.check([first, second, third])


def test_the_last_token_of_an_equal_prompt_is_left_to_compute():
    pool, tokens = PagePool(8, PAGE), [1, 2, 3, 4, 5, 6, 7, 8]
    filled(pool, tokens)
    assert pool.adopt(PageTable(""), tokens) == 4
    assert pool.adopt(PageTable(""), tokens[:4]) == 0
    assert pool.adopt(PageTable(""), [*tokens, 9]) == 8


def test_equal_tokens_after_another_beginning_or_salt_are_not_shared():
    pool = PagePool(8, PAGE)
    filled(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    assert pool.adopt(PageTable(""), [5, 6, 7, 8, 0]) == 0
    assert pool.adopt(PageTable("tenant"), [1, 2, 3, 4, 0]) == 0


def test_names_with_one_hash_are_told_apart():
    """hash(-1) == hash(-2), so these pages meet in one place of a table of hashes."""
    pool = PagePool(8, PAGE)
    assert hash((-1, -1, -1, -1)) == hash((-2, -2, -2, -2))
    filled(pool, [-1, -1, -1, -1, 0])
    assert pool.adopt(PageTable(""), [-2, -2, -2, -2, 0]) == 0


def test_a_page_has_no_name_before_it_is_computed():
    pool, tokens = PagePool(8, PAGE), [1, 2, 3, 4, 5]
    table = PageTable("")
    pool.extend(table, 5)
    assert pool.adopt(PageTable(""), tokens) == 0
    pool.publish(table, tokens, 3)
    assert pool.adopt(PageTable(""), tokens) == 0
    pool.publish(table, tokens, 4)
    assert pool.adopt(PageTable(""), tokens) == 4


def test_released_pages_are_revived_and_the_longest_unused_goes_first():
    pool = PagePool(4, PAGE)
    table = filled(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    held = list(table.pages)
    pool.release(table)
    assert (table.pages, pool.free) == ([], 4)
    again = PageTable("")
    assert pool.adopt(again, [1, 2, 3, 4, 9]) == 4
    assert again.pages == held[:1]
    # Two were never used, then comes the end of what was released; its beginning is held again.
    taken = PageTable("")
    assert pool.extend(taken, 3 * PAGE) == [2, 3, held[1]]
    assert pool.extend(taken, 4 * PAGE) is None
    pool.check([again, taken])


def test_a_copy_of_a_named_page_stays_without_a_name_and_what_follows_is_shared():
    """Two sequences that begin in one step compute the same page each."""
    pool, tokens = PagePool(8, PAGE), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    first, second = PageTable(""), PageTable("")
    for table in (first, second):
        pool.extend(table, 9)
    for table in (first, second):
        pool.publish(table, tokens, 9)
    third = PageTable("")
    assert pool.adopt(third, [*tokens[:8], 0]) == 8
    assert third.pages == first.pages[:2]
    pool.check([first, second, third])


@pytest.mark.parametrize("seed", range(3))
def test_any_history_keeps_the_books(seed):
    """Random beginnings in common, growth and release; at the end nobody holds a page."""
    rng, pool, tables = random.Random(seed), PagePool(12, PAGE), []
    for _ in range(600):
        if tables and rng.random() < 0.4:
            table, _ = tables.pop(rng.randrange(len(tables)))
            pool.release(table)
        elif tables and rng.random() < 0.5:
            table, tokens = rng.choice(tables)
            if pool.extend(table, len(tokens) + 1) is not None:
                tokens.append(rng.randrange(2))
                pool.publish(table, tokens, len(tokens))
        else:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
            table = PageTable(rng.choice(["", "a"]))
            pool.adopt(table, tokens)
            if pool.extend(table, len(tokens)) is None:
                pool.release(table)
            else:
                pool.publish(table, tokens, len(tokens))
                tables.append((table, tokens))
        pool.check([table for table, _ in tables])
    for table, _ in tables:
        pool.release(table)
    pool.check([])
    assert pool.free == 12
