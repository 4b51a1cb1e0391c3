"""The layouts of the three sweeps together."""

from __future__ import annotations

from tests.equivalence import test_encoder_layouts, test_expert_layouts, test_layouts
from tests.layouts.layout import Layout


def swept(many: bool) -> list[Layout]:
    """All that the default suite trains, or those of `--slow`."""
    return [
        layout
        for sweep in (test_layouts.SWEEP, test_encoder_layouts.SWEEP, test_expert_layouts.SWEEP)
        for layout in sweep.selection(sweep.many if many else sweep.few)
    ]
