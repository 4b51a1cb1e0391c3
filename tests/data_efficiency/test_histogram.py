from __future__ import annotations

import sys

import numpy as np
import pytest

from megazero.data_efficiency import histogram
from megazero.data_efficiency.histogram import bars, check_drawing, draw_sum, draw_values, percentiles
from megazero.data_efficiency.metric_index import MetricIndex
from megazero.errors import ConfigError
from megazero.pictures import style
from tests.tables import over_table


def index_of(values: list[int]) -> MetricIndex:
    distinct, counts = np.unique(values, return_counts=True)
    return MetricIndex(distinct, np.cumsum(counts), np.argsort(values, kind="stable"))


def test_percentiles_of_a_hundred():
    assert percentiles(index_of(list(range(1, 101)))) == [1, 5, 25, 50, 75, 95, 100]


def test_percentiles_of_few():
    assert percentiles(index_of([7])) == [7] * 7
    assert percentiles(index_of([1, 1, 1, 9]), (0, 50, 75, 76, 100)) == [1, 1, 1, 9, 9]


def test_bars_are_no_narrower_than_a_value():
    edges, samples = bars(index_of([3, 3, 5]))
    assert edges.tolist() == [2.5, 3.5, 4.5, 5.5]
    assert samples.tolist() == [2, 0, 1]


@over_table("high", [1, 59, 60, 61, 12345, 1 << 40, (1 << 63) - 1])
def test_every_sample_is_in_a_bar(high):
    values = [-high, 0, 0, high // 2, high]
    edges, samples = bars(index_of(values))
    assert samples.sum() == 5
    assert len(samples) <= 60
    assert edges[0] <= -high
    assert samples[0] >= 1
    assert samples[-1] >= 1


@pytest.mark.parametrize(("suffix", "theme"), [("png", style.LIGHT), ("svg", style.DARK)])
def test_a_distribution_is_drawn_so_that_it_can_be_read(tmp_path, monkeypatch, suffix, theme):
    pytest.importorskip("matplotlib")
    from tests.pictures.checks import complaints

    def looked_at(figure, path):
        assert complaints(figure, theme) == []
        style.save(figure, path)

    monkeypatch.setattr(histogram, "save", looked_at)
    draw_values(index_of([3, 3, 5, 2_000_000]), "seqlen", tmp_path / f"a.{suffix}", theme)
    draw_sum(np.array([0, 5, 100]), "m", tmp_path / f"b.{suffix}", theme)
    assert all((tmp_path / f"{name}.{suffix}").stat().st_size > 1000 for name in "ab")


def test_without_matplotlib_the_error_comes_first(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        check_drawing()
