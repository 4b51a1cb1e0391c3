from __future__ import annotations

from pathlib import Path

import pytest

from megazero.data_tools.looking import outputs, plan, stats
from megazero.pictures.style import THEMES
from tests.data_tools.looking.conftest import Write
from tests.pictures.checks import complaints


@pytest.mark.parametrize("name", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_pictures_can_be_read(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of sources that are seen in part, again and again, and of a dataset without documents."""
    wrong: dict[Path, list[str]] = {}
    monkeypatch.setattr(
        outputs, "save", lambda figure, path: wrong.update({path: complaints(figure, THEMES[name])})
    )
    a, b, empty = write("a", [40, 9, 3] * 10), write("b", [15, 1]), write("empty", [])
    flags = ["--theme", name, "--picture"]
    sizes = ["--seq-length", "8", "--samples", "40", "--split", "1"]
    assert plan.main(["0.8", a, "0.2", b, *sizes, *flags, str(tmp_path / "p.svg")]) == 0
    assert stats.main([a, b, empty, *flags, str(tmp_path / "s.png")]) == 0
    assert stats.main([empty, *flags, str(tmp_path / "e.png")]) == 0
    assert wrong == {tmp_path / "p.svg": [], tmp_path / "s.png": [], tmp_path / "e.png": []}
