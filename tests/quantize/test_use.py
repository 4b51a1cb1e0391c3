"""Models that compute with a folder's codes, on any layout."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.formats.megatron.reader import ImportOptions
from megazero.inference.invariant import make_invariant
from megazero.inference.staged import StagedModel
from megazero.layers.coded import CodedProduct
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear
from megazero.models.batch import Batch
from megazero.mpu.context import thread_context
from megazero.mpu.launch import Launch, grid_of
from megazero.mpu.thread_group import ThreadWorld
from megazero.ops import native
from megazero.ops.coded_linear import CodedWeight, coded_linear
from megazero.quantize.recipe import Recipe
from megazero.train.resume.trained import AxisSizes, load_for_inference
from tests.quantize.samples import quantized
from tests.tables import over_table

TOKENS = torch.arange(14).view(2, 7)
RECIPES = {
    "W4": Recipe.of("W4", "rtn", 16),
    "W8": Recipe.of("W8", "rtn"),
    "W8A8": Recipe.of("W8A8", "rtn"),
}


@pytest.fixture(scope="module")
def folders(llama, tmp_path_factory):
    """The folder of each scheme."""
    made = tmp_path_factory.mktemp("codes")
    for name, recipe in RECIPES.items():
        quantized(llama, made / name, recipe)
    return made


def models(folder, monkeypatch, world_size: int = 1, sizes: AxisSizes | None = None, run=None):
    """What `run(loaded, model)` returns on every rank; by default the logits [b, s, v]."""
    world, words = ThreadWorld(world_size), WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>")
    Tokenizer(words).save(str(folder / "tokenizer.json"))
    names = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(folder))
    options = ImportOptions(tokenizer=names)
    monkeypatch.setattr(
        "megazero.train.resume.trained.join",
        lambda parallel, launch: thread_context(world, grid_of(parallel, launch.world_size), launch.rank),
    )

    def work(rank: int):
        loaded = load_for_inference(str(folder), Launch(rank, world_size), sizes, options=options)
        model = StagedModel(loaded.chunks, loaded.stage_of, loaded.context.pp)
        return logits(model) if run is None else run(loaded, model)

    return world.run(work)


def logits(model: StagedModel, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    def every(head, hidden):
        return model.unsliced(head(hidden)).transpose(0, 1)

    with torch.inference_mode():
        return model.run(Batch(tokens), every, (*tokens.shape, model.vocab_size))


def linears(model: StagedModel):
    modules = (module for chunk in model.chunks.values() for module in chunk.modules())
    return [module for module in modules if isinstance(module, (ColumnParallelLinear, RowParallelLinear))]


@over_table("scheme", ["W4", "W8"])
def test_codes_are_kept_and_give_the_logits_of_the_floats(folders, scheme, monkeypatch):
    def held(loaded, model):
        layers = linears(model)
        assert all(isinstance(layer.product, CodedProduct) and layer.weight is None for layer in layers)
        assert loaded.remarks == ()
        return logits(model), sum(layer.product.weight.nbytes for layer in layers)

    ((own, nbytes),) = models(folders / scheme, monkeypatch, run=held)
    elements = 2 * (96 * 32 + 32 * 32 + 96 * 32 + 32 * 48)
    scales = 4 * (elements // 16 if scheme == "W4" else 2 * (96 + 32 + 96 + 32))
    assert nbytes == (elements // 2 if scheme == "W4" else elements) + scales
    monkeypatch.setattr("megazero.train.resume.trained.keep_codes", lambda *given: ())
    (floats,) = models(folders / scheme, monkeypatch)
    torch.testing.assert_close(own, floats, rtol=1e-5, atol=1e-5)


def test_inputs_are_rounded_where_the_scheme_says_so(folders, monkeypatch):
    """As a model with floats computes whose linear layers round their inputs."""
    (own,) = models(folders / "W8A8", monkeypatch)

    def rounding(loaded, model):
        def rounded(layer, given):
            scale = given[0].abs().amax(-1, keepdim=True) / 127.5
            return ((given[0] / scale).round().clamp(-128, 127) * scale, *given[1:])

        plain = logits(model)
        for layer in linears(model):
            layer.register_forward_pre_hook(rounded)
        return plain, logits(model)

    monkeypatch.setattr("megazero.train.resume.trained.keep_codes", lambda *given: ())
    ((plain, rounded),) = models(folders / "W8A8", monkeypatch, run=rounding)
    torch.testing.assert_close(own, rounded, rtol=1e-4, atol=1e-4)
    assert (plain - own).abs().max() > 1e-3


@pytest.mark.seconds(6)
@pytest.mark.parametrize("scheme", RECIPES)
@over_table("sizes", [AxisSizes(2), AxisSizes(1, 2), AxisSizes(4), AxisSizes(2, 2)], ids=str)
def test_slices_and_stages_are_one_process(folders, scheme, sizes, monkeypatch):
    """Slices of 24 and 12 of 48 inputs cut groups of 16, which become groups of 8 and 4."""
    (alone,) = models(folders / scheme, monkeypatch)
    world_size = sizes.tensor * (sizes.pipeline or 1)

    def kept(loaded, model):
        assert all(isinstance(layer.product, CodedProduct) for layer in linears(model))
        return logits(model)

    for sliced in models(folders / scheme, monkeypatch, world_size, sizes, kept):
        if scheme == "W8A8":  # a sum's last bit may take an input over the edge between two codes
            assert ((sliced - alone).abs().amax(-1) > 2e-5).sum() <= 2
            torch.testing.assert_close(sliced, alone, rtol=0, atol=1e-2)
        else:
            torch.testing.assert_close(sliced, alone, rtol=1e-5, atol=2e-5)


def test_slices_of_inputs_have_the_scale_of_whole_rows():
    """Their codes are those of one process, so that sums differ by the rounding of what is added."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-128, 128, (20, 48), generator=generator).to(torch.int8)
    scales, x = torch.rand(20, 1, generator=generator), torch.randn(5, 1, 48, generator=generator)
    whole = coded_linear(x, CodedWeight.of(codes, scales, 8, True), None)
    world = ThreadWorld(3)

    def work(rank: int) -> torch.Tensor:
        group, own = world.group("tp", rank, (0, 1, 2)), slice(16 * rank, 16 * rank + 16)
        product = CodedProduct(CodedWeight.of(codes[:, own], scales, 8, True), group)
        return product(x[..., own], None, None, group, False)

    torch.testing.assert_close(sum(world.run(work)), whole, rtol=1e-6, atol=1e-5)


@pytest.mark.skipif(not native.available(), reason="the compiled kernels are not built")
@over_table("scheme", RECIPES)
def test_batch_invariance_holds_and_has_the_bits_of_the_floats(folders, scheme, monkeypatch):
    def invariant(loaded, model):
        make_invariant(model)
        alone = torch.cat([logits(model, TOKENS[i : i + 1]) for i in range(len(TOKENS))])
        return logits(model), alone

    ((among, alone),) = models(folders / scheme, monkeypatch, run=invariant)
    assert torch.equal(among, alone)
    if scheme != "W8A8":
        monkeypatch.setattr("megazero.train.resume.trained.keep_codes", lambda *given: ())
        ((floats, _),) = models(folders / scheme, monkeypatch, run=invariant)
        assert torch.equal(among, floats)


def test_experts_are_read_as_floats_and_named(experts, tmp_path, monkeypatch):
    quantized(experts, tmp_path / "out", RECIPES["W4"])

    def told(loaded, model):
        assert all(isinstance(layer.product, CodedProduct) for layer in linears(model))
        return loaded.remarks, logits(model)

    ((remarks, own),) = models(tmp_path / "out", monkeypatch, run=told)
    names = ", ".join(f"layers.*.mlp.experts.{name}.weight" for name in ("down", "up"))
    assert remarks == (f"quantized weights are read as floats: {names}",)
    monkeypatch.setattr("megazero.train.resume.trained.keep_codes", lambda *given: ())
    (floats,) = models(tmp_path / "out", monkeypatch)
    torch.testing.assert_close(own, floats, rtol=1e-5, atol=1e-5)


def test_groups_of_two_are_read_as_floats_and_named(llama, tmp_path, monkeypatch):
    quantized(llama, tmp_path / "out", Recipe.of("W4", "rtn", 2, ignore=("gate_proj",)))

    def told(loaded, model):
        assert not any(isinstance(layer.product, CodedProduct) for layer in linears(model))
        return loaded.remarks

    ((remark,),) = models(tmp_path / "out", monkeypatch, run=told)
    names = ("attention.out", "attention.qkv", "mlp.down")
    assert (
        remark == f"quantized weights are read as floats: {', '.join(f'layers.*.{n}.weight' for n in names)}"
    )
