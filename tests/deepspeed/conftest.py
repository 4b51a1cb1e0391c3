"""DeepSpeed's scripts join a world, of one process too; a test must not leave this process in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megazero.mpu.torch_group import joined_world, leave_world


@pytest.fixture(autouse=True)
def outside_of_any_world() -> Iterator[None]:
    joined = joined_world()
    yield
    if joined is None:
        leave_world()
