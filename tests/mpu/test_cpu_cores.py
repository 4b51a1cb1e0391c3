"""Who else runs on a machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megazero.mpu import cpu_cores


@pytest.mark.parametrize(
    ("looks", "own", "others"),
    [
        (["0.0 0.0 0.0 3/90 7"] * 5, 2, 1),
        (["9.9 0.0 0.0 2/90 7"] * 5, 2, 0),  # the load is of what ran before
        (["0 0 0 9/90 7", "0 0 0 3/90 7", "0 0 0 8/90 7", "0 0 0 7/90 7", "0 0 0 6/90 7"], 1, 2),
        (["0 0 0 1/90 7"] * 5, 4, 0),
        (["nothing"], 1, None),
    ],
)
def test_tasks_beside_the_job_s_own_are_counted(looks, own, others, monkeypatch):
    monkeypatch.setattr(cpu_cores.time, "sleep", lambda seconds: None)
    texts = iter(looks)
    assert cpu_cores.others_running(own, SimpleNamespace(read_text=lambda: next(texts))) == others


def test_a_system_that_does_not_say_is_no_fault(tmp_path):
    assert cpu_cores.others_running(1, tmp_path / "none") is None
