from __future__ import annotations

from pathlib import Path

import pytest

from megazero.data_tools.looking.pictures import plan_figure, stats_figure
from megazero.data_tools.looking.plan import main
from megazero.pictures.style import THEMES, styled
from tests.data_tools.looking.conftest import Write
from tests.pictures.checks import complaints, ink

SOURCE = {"prefix": "/d/web", "share": 0.5, "realized": 0.5, "tokens": 10_000, "sequences": 40, "exact": True}
PLAN = {
    "samples": 1000, "seq_length": 16,
    "sources": [
        {**SOURCE, "epochs": 0.4, "first_repeat": None, "first_repeat_step": None, "unseen_tokens": 6000,
         "unseen_sequences": 12},
        {**SOURCE, "prefix": "/d/math", "epochs": 5.25, "first_repeat": 8, "first_repeat_step": 3,
         "unseen_tokens": 0, "unseen_sequences": 0},
    ],
}  # fmt: skip
STATS = {
    "documents": 300, "tokens": 9000,
    "sources": [
        {"prefix": f"/d/{name}", "documents": 100, "share": 1 / 3, "histogram": rows}
        for name, rows in (
            ("a", [[0, 0, 10], [1, 1, 0], [2, 3, 0], [4, 7, 60], [8, 15, 30]]),
            ("b", [[0, 0, 0], [1, 1, 0], [2, 3, 0], [4, 7, 10], [8, 15, 40], [16, 31, 50]]),
            ("c", []),
        )
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_both_pictures_can_be_read(name: str) -> None:
    theme = THEMES[name]
    with styled(theme):
        assert complaints(plan_figure(PLAN, theme), theme) == []
        assert complaints(stats_figure(STATS, theme), theme) == []


def test_a_plan_draws_into_a_file(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [write("a", [40] * 10), "--seq-length", "8", "--samples", "20"]
    assert main([*words, "--picture", str(tmp_path / "p.png"), "--theme", "dark"]) == 0
    assert capsys.readouterr().out.startswith("20 samples")
    assert ink(tmp_path / "p.png", THEMES["dark"].paper) > 0.05
