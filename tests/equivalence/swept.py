"""The layouts of the sweeps together."""

from __future__ import annotations

from tests.equivalence import (
    test_context_layouts,
    test_encoder_layouts,
    test_expert_layouts,
    test_hybrid_layouts,
    test_layouts,
)
from tests.layouts.layout import Layout


def swept(many: bool) -> list[Layout]:
    """All that the default suite trains, or those of `--slow`."""
    modules = (
        test_layouts,
        test_encoder_layouts,
        test_expert_layouts,
        test_context_layouts,
        test_hybrid_layouts,
    )
    return [
        layout
        for sweep in (module.SWEEP for module in modules)
        for layout in sweep.selection(sweep.many if many else sweep.few)
    ]
