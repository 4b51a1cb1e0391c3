from __future__ import annotations

from proofs.fuzz_index import SITUATIONS, fuzz


def test_damaged_files_are_refused_or_read_right(tmp_path):
    found = fuzz(count=1200, seed=20, directory=tmp_path)
    assert sum(found.values()) == 1200
    bad = {key: n for key, n in found.items() if key[1] in ("silent_wrong", "crashed")}
    assert bad == {}
    for situation in SITUATIONS:
        assert found[situation, "refused"] > 150, "the mutations must bite"
    assert found["idx", "opened_equal"] > 0, "some mutations change nothing, and must then open"
