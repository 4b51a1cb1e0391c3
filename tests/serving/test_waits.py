"""What a step copies to the device, or waits for, does not grow with layers and rows."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from megazero.inference.sampling import Sampling
from megazero.inference.staged import StagedModel
from megazero.mpu.host_waits import HostWaits
from megazero.ops import native
from megazero.serving.engine import EngineLimits, complete
from megazero.serving.sampled import Row, draw
from megazero.serving.wanted import Wanted
from tests.inference.samples import LLAMA, build
from tests.serving.samples import requests

CUT = Sampling(0.8, top_k=9, top_p=0.9, min_p=0.01)


@pytest.mark.parametrize("coded", [False, True])
def test_all_layers_share_what_a_step_copies(coded):
    """Without compiled kernels, as on a GPU: there each copy once waited for all layers before."""
    counts = []
    for layers in (1, 3):
        model = StagedModel.whole(build(LLAMA.model_copy(update={"num_layers": layers, "seq_length": 48})))
        model.coded_cache = coded
        with patch.dict(vars(native._BACKEND), built=False), HostWaits() as waits:
            complete(model, requests(4), EngineLimits(48, 40, 16, 64, 8))
        counts.append(
            sum(number for (where, _), number in waits.found.items() if where.startswith("serving"))
        )
    assert counts[0] == counts[1] > 0


def test_all_rows_are_drawn_with_as_many_waits_as_one():
    counts = []
    for rows in (1, 7):
        logits = torch.randn(rows, 40, generator=torch.Generator().manual_seed(1))
        wanted = [Wanted((1, 2), 3, CUT, number, as_drawn=True) for number in range(rows)]
        with HostWaits() as waits:
            tokens = draw(logits, [Row(one, [1, 2]) for one in wanted])
        counts.append(sum(waits.found.values()))
        for token in tokens:
            assert token.id in [one for one, _ in token.best]
            assert 0 < len(token.best) <= 9
    assert counts[0] == counts[1] > 0
