"""Law 1 with latent attention and the prediction of further tokens: any layout trains as one process does."""

from __future__ import annotations

import pytest

from megazero.config.training_plan import training_plan_of
from megazero.layers.fp8 import Fp8Scaling
from megazero.layers.linear import RowParallelLinear
from megazero.mpu.context import solo_context
from megazero.mpu.param_spec import spec_of
from megazero.verify.record import verification_engine
from tests.equivalence.one_process import Sweep, check_as_threads
from tests.layouts.layout import LATENT, Layout
from tests.layouts.selection import latent_layouts

SWEEP = Sweep(latent_layouts, 10, 220, every=3)


def pytest_generate_tests(metafunc):
    SWEEP.parametrize(metafunc)


def test_layout_equals_one_process(selected):
    check_as_threads(selected)


def test_the_selection_holds_every_pair_of_settings():
    names = ("tp", "pp", "dp", "cp", "schedule", "zero", "recompute", "experts", "shape")
    others = ("zero", "untied", "sequence_parallel", "micro_batch", "documents", "dropout", "attends", "ep")
    SWEEP.few_have({"shape": set(LATENT)})
    SWEEP.holds_every_pair(names, others, least=200, slow=True)


@pytest.mark.parametrize(
    "layout",
    [
        # The last stage's copy of the embedding learns at the rate of the embedding.
        Layout(shape="deepseek", untied=True, pp=2, samples=4),
        Layout(shape="deepseek", compiled="aot_eager", samples=4),
    ],
    ids=lambda layout: layout.name,
)
def test_further_tokens_are_part_of_the_model(layout):
    check_as_threads(layout)


def test_layers_of_further_tokens_have_products_of_8_bits_too():
    config = Layout(shape="deepseek", fp8="tensorwise", samples=4).config()
    engine = verification_engine(config, training_plan_of(config, 1), solo_context())
    products = {
        spec_of(m.weight).name: isinstance(m.product, Fp8Scaling)
        for chunk in engine.executor.chunks.values()
        for m in chunk.modules()
        if isinstance(m, RowParallelLinear)
    }
    further = [name for name in products if name.startswith(f"layers.{config.model.num_layers}.")]
    assert further
    assert all(products.values())
