"""Compressed training: the formulas by hand, the schedule, and what is left when it is over."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from megazero.deepspeed.initialize import initialize
from megazero.deepspeed.legacy.compression.compress import (
    compressed_layers,
    init_compression,
    redundancy_clean,
)
from megazero.deepspeed.legacy.compression.helper import convert_conv1d_to_linear, student_initialization
from megazero.deepspeed.legacy.compression.layers import CompressedLinear
from megazero.deepspeed.legacy.compression.prune import largest
from megazero.deepspeed.legacy.compression.quantize import (
    ActivationQuantizer,
    WeightQuantizer,
    bits_at,
    quantized,
)
from megazero.errors import ConfigError
from tests.tables import over_table

ROWS = torch.tensor(
    [
        [-1.0, -0.4, 0.1, 0.3, 0.6, 1.0],
        [0.0] * 6,
        [2.0, 2.0, 2.0, 2.0, 2.0, 2.0],
        [0.0, 1.0, 2.0, 3.0, 4.0, 8.0],
    ]
)


class Attention(nn.Module):
    """Two heads of three features without a softmax: enough to count heads."""

    def __init__(self):
        super().__init__()
        self.num_heads = 2
        self.query, self.value = nn.Linear(6, 6), nn.Linear(6, 6)
        self.output = nn.Linear(6, 6)

    def forward(self, x):
        heads = (self.query(x) * self.value(x)).view(*x.shape[:-1], self.num_heads, -1)
        return self.output((heads * torch.arange(1.0, 4.0)).flatten(-2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.down(torch.relu(self.up(x)))


def section(technique: str, params: dict, modules: list, related: list | None = None, **shared) -> dict:
    group = {"params": params, "modules": modules, "related_modules": related}
    parameters = {"enabled": True, "schedule_offset": 0, **shared}
    return {technique: {"shared_parameters": parameters, "different_groups": {"a": group}}}


def config(*sections: dict) -> dict:
    return {"compression_training": {name: content for each in sections for name, content in each.items()}}


def model() -> Model:
    torch.manual_seed(5)
    return Model()


def inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, 24).view(4, 6)


def test_rounding_by_hand():
    assert quantized(ROWS, 1)[0].tolist() == pytest.approx([-3.4 / 6] * 2 + [3.4 / 6] * 4)
    # The mean magnitude is 3.4 / 6, and 0.7 of it 0.397: -1, -0.4, 0.6 and 1 stay, with a mean of 0.75.
    assert quantized(ROWS, 2)[0].tolist() == pytest.approx([-0.75, -0.75, 0, 0, 0.75, 0.75])
    # Steps of 2 / 8; 1 is the fifth step, but only three are above 0.
    assert quantized(ROWS, 3)[0].tolist() == pytest.approx([-1.0, -0.5, 0.0, 0.25, 0.5, 0.75])
    # From 0 in steps of 8 / 8, of which there are eight.
    assert quantized(ROWS, 3, symmetric=False)[3].tolist() == pytest.approx([0, 1, 2, 3, 4, 7])


@over_table("symmetric", [True, False])
@over_table("bits", [1, 2, 3, 8])
def test_a_row_of_zeros_stays_one_and_rows_have_few_values(bits, symmetric):
    rounded = quantized(ROWS, bits, symmetric=symmetric)
    assert rounded.isfinite().all()
    assert rounded[1].tolist() == [0.0] * 6
    assert all(len(row.unique()) <= 2**bits for row in rounded)


def test_stochastic_rounding_is_right_on_average():
    torch.manual_seed(0)
    rows = torch.full((20_000, 2), 0.3)
    rows[:, 1] = -1.0
    rounded = quantized(rows, 2 + 1, stochastic=True)
    assert sorted(rounded[:, 0].unique().tolist()) == [0.25, 0.5]
    assert rounded[:, 0].mean().item() == pytest.approx(0.3, abs=0.003)


def test_bits_fall_by_one_each_period_which_doubles():
    steps = (0, 4, 5, 9, 10, 19, 20, 1000)
    expected = [(12, 0), (12, 0), (11, 5), (11, 5), (10, 10), (10, 10), (9, 20), (9, 20)]
    assert [bits_at(step, 12, 9, 5) for step in steps] == expected
    assert bits_at(0, 8, 8, 0) == (8, 0)
    assert bits_at(0, 1, 1, 0) == (1, 0)


def test_the_largest_number_around_0_is_cut_by_a_step_and_equal_numbers_stay():
    """With 8 bits the step of [-1, 1] is 1/128, as in DeepSpeed; equal numbers had become integers."""
    assert quantized(torch.tensor([[1.0, -1.0]]), 8).tolist() == [[127 / 128, -1.0]]
    equal = torch.full((1, 4), 0.3)
    assert torch.equal(quantized(equal, 4, symmetric=False), equal)


def test_the_exact_weights_share_is_1_again_after_each_fall_of_the_bits():
    quantizer = WeightQuantizer(4, 3, 2, 1, True, False, change_ratio=0.5)
    weight = torch.tensor([[0.9, -0.31, 0.17]])
    rounded = {bits: quantized(weight, bits) for bits in (4, 3)}
    expected = [(weight, 4, 1.0), (weight, 4, 0.5), (weight, 3, 1.0), (weight, 3, 0.5), (weight, 3, 0.0)]
    for step, (exact, bits, share) in enumerate(expected):
        torch.testing.assert_close(quantizer(weight, step), share * exact + (1 - share) * rounded[bits])


def test_weights_that_are_rounded_in_the_forward_have_the_target_bits_at_once():
    bits = {"start_bits": 8, "target_bits": 1, "quantization_period": 100}
    forward = section("weight_quantization", bits, ["up"], quantize_weight_in_forward=True)
    up = init_compression(model(), config(forward)).up
    assert len(up.treatment.weight(up.weight).unique()) == 2


class Tied(nn.Module):
    """A table of words that is also the head."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(5, 6), nn.Linear(6, 5, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(self.words(ids))


def test_a_table_that_the_head_shares_is_rounded_once_by_rows():
    torch.manual_seed(3)
    net, ids = Tied(), torch.arange(5)
    rows = quantized(net.words.weight.detach(), 4)
    rounding = config(section("weight_quantization", {"start_bits": 4, "target_bits": 4}, ["words", "head"]))
    init_compression(net, rounding)
    trained = net(ids)
    redundancy_clean(net, rounding)
    assert net.head.weight is net.words.weight
    assert torch.equal(net.words.weight, rows)
    torch.testing.assert_close(net(ids), trained)


def test_a_run_that_is_resumed_computes_with_the_bits_that_it_had(tmp_path):
    """The first step after a resume had been computed with whole weights."""
    bits = {"start_bits": 1, "target_bits": 1, "quantization_period": 0}
    rounding = config(section("weight_quantization", bits, ["up"], schedule_offset=2))

    def engine():
        net = init_compression(model(), rounding)
        settings = {"train_batch_size": 4, "zero_optimization": {"stage": 1}}
        return initialize(model=net, config=settings, optimizer=torch.optim.SGD(net.parameters(), 0.1))[0]

    first, second = engine(), engine()
    for _ in range(2):
        first.backward(first(inputs()).square().mean())
        first.step()
    first.save_checkpoint(tmp_path)
    second.load_checkpoint(tmp_path)
    assert second.module.up.treatment.step == 2
    assert torch.equal(second(inputs()), first(inputs()))


def test_a_running_range_moves_by_a_twentieth_in_training_alone():
    quantizer = ActivationQuantizer(8, symmetric=False, static=True)
    quantizer(torch.tensor([[-1.0, 1.0]]))
    quantizer(torch.tensor([[-3.0, 1.0]]))
    assert quantizer.running.tolist() == pytest.approx([-1.1, 1.0])
    quantizer.eval()
    assert quantizer(torch.tensor([[-9.0, 9.0]])).tolist()[0] == pytest.approx([-1.1, 1.0], abs=0.02)
    assert quantizer.running.tolist() == pytest.approx([-1.1, 1.0])


def test_tokens_are_rounded_one_by_one():
    quantizer = ActivationQuantizer(4, symmetric=True, static=False)
    x = torch.tensor([[[1.0, 0.4], [100.0, 40.0]]])
    assert quantizer(x)[0, 1].tolist() == pytest.approx([100 * v for v in quantizer(x)[0, 0].tolist()])


@over_table(("ratio", "kept"), [(0.5, 4), (0.51, 5), (0.01, 1), (1.0, 8)])
def test_the_share_that_stays_is_rounded_up(ratio, kept):
    mask = largest(torch.arange(8.0), ratio)
    assert mask.tolist() == [0.0] * (8 - kept) + [1.0] * kept


def test_a_technique_begins_after_its_offset():
    quantization = section(
        "weight_quantization",
        {"start_bits": 1, "target_bits": 1, "quantization_period": 0},
        ["up"],
        schedule_offset=2,
    )
    compressed = init_compression(model(), config(quantization))
    plain, x = model(), inputs()
    scheduler = compressed.compression_scheduler
    equal = [torch.equal(compressed(x), plain(x))]
    for _ in range(3):
        scheduler.step()
        equal.append(torch.equal(compressed(x), plain(x)))
    assert equal == [True, True, False, False]
    weight = compressed.up.treatment.weight(compressed.up.weight)
    assert len(weight.unique()) == 2


def test_gradients_go_straight_through():
    compressed = init_compression(
        model(), config(section("weight_quantization", {"start_bits": 2, "target_bits": 2}, ["up"]))
    )
    compressed.up(inputs()).sum().backward()
    assert compressed.up.weight.grad[0].tolist() == pytest.approx(inputs().sum(0).tolist())


CLEANED = [
    (section("sparse_pruning", {"dense_ratio": 0.3}, ["up", "down"]),),
    (section("sparse_pruning", {"dense_ratio": 0.3}, ["up"], method="topk"),),
    (section("row_pruning", {"dense_ratio": 0.5}, ["^up"]),),
    (section("row_pruning", {"dense_ratio": 0.5}, ["^up"], [["^down"]]),),
    (section("row_pruning", {"dense_ratio": 0.5}, ["^up"], [["^down"]], method="topk"),),
    (section("head_pruning", {"dense_ratio": 0.5}, ["output"], num_heads=2),),
    (section("head_pruning", {"dense_ratio": 0.5}, ["output"], [["query", "value"]], num_heads=2),),
    (
        section("weight_quantization", {"start_bits": 4, "target_bits": 4}, ["*"], quantize_groups=2),
        section("sparse_pruning", {"dense_ratio": 0.5}, ["down"]),
        section("activation_quantization", {"bits": 8}, ["up"]),
    ),
]


@over_table("sections", CLEANED)
def test_the_cleaned_model_computes_what_the_masked_one_did(sections):
    compressed = init_compression(model(), config(*sections)).eval()
    x = inputs()
    before = compressed(x)
    cleaned = redundancy_clean(compressed, config(*sections))
    assert cleaned(x).tolist() == [pytest.approx(row, abs=1e-6) for row in before.tolist()]
    rounds_inputs = "activation_quantization" in config(*sections)["compression_training"]
    assert [type(layer) for layer in compressed_layers(cleaned)] == [CompressedLinear] * rounds_inputs
    assert not hasattr(cleaned, "compression_scheduler")


def test_what_is_pruned_is_removed_on_both_sides():
    rows = config(section("row_pruning", {"dense_ratio": 0.5}, ["^up"], [["^down"]]))
    cleaned = redundancy_clean(init_compression(model(), rows), rows)
    assert cleaned.up.weight.shape == (4, 6)
    assert (cleaned.up.out_features, cleaned.down.in_features) == (4, 4)
    assert cleaned.up.bias.shape == (4,)
    heads = config(
        section("head_pruning", {"dense_ratio": 0.5}, ["output"], [["query", "value"]], num_heads=2)
    )
    cleaned = redundancy_clean(init_compression(model(), heads), heads)
    assert cleaned.attention.query.weight.shape == (3, 6)
    assert cleaned.attention.output.weight.shape == (6, 3)
    assert cleaned.attention.num_heads == 1


def test_channels_of_a_convolution():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    channels = config(section("channel_pruning", {"dense_ratio": 0.5}, ["^0"], [["^2"]]))
    net = init_compression(net, channels)
    x = torch.randn(1, 2, 5, 5)
    before = net(x)
    cleaned = redundancy_clean(net, channels)
    assert cleaned[0].weight.shape == (2, 2, 3, 3)
    assert cleaned[2].weight.shape == (2, 2, 1, 1)
    assert torch.allclose(cleaned(x), before, atol=1e-6)


def test_embeddings_are_rounded_row_by_row():
    table = config(section("weight_quantization", {"start_bits": 1, "target_bits": 1}, ["*"]))
    net = init_compression(nn.Sequential(nn.Embedding(5, 4)), table)
    assert all(len(row.abs().unique()) == 1 for row in net(torch.arange(5)))


def test_a_student_begins_with_its_teachers_layers():
    def stack(count: int, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.ModuleDict(
            {"layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(count)), "head": nn.Linear(2, 1)}
        )

    teacher, student = stack(4, 1), stack(2, 2)
    reduction = {
        "layer_reduction": {
            "enabled": True,
            "keep_number_layer": 2,
            "module_name_prefix": "layers",
            "teacher_layer": [1, 3],
            "other_module_name": ["head"],
        }
    }
    init_compression(student, config(reduction), teacher_model=teacher)
    assert torch.equal(student["layers"][1].weight, teacher["layers"][3].weight)
    assert torch.equal(student["head"].weight, teacher["head"].weight)
    with pytest.raises(ConfigError, match="`teacher_model` must be given"):
        init_compression(stack(2, 2), config(reduction))
    reduction["layer_reduction"]["teacher_layer"] = [1, 7]
    with pytest.raises(ConfigError, match=r"has no `layers\.7`"):
        student_initialization(stack(2, 2), teacher, config(reduction))


@over_table(
    ("sections", "says"),
    [
        ({}, "must be a section of the configuration"),
        (config({"weight_quantisation": {}}), "did you mean `weight_quantization`"),
        (config(section("sparse_pruning", {"dense_ratio": 1.5}, ["*"])), "at most 1, but is 1.5"),
        (config(section("sparse_pruning", {}, ["*"])), "dense_ratio` must be given"),
        (
            config(section("sparse_pruning", {"dense_ratio": 0.5}, ["*"], method="snip_momentum")),
            "l1 or topk",
        ),
        (config(section("head_pruning", {"dense_ratio": 0.5}, ["*"])), "num_heads` must be given"),
        (config(section("sparse_pruning", {"dense_ratio": 0.5}, ["nowhere"])), "nowhere names none"),
        (config(section("row_pruning", {"dense_ratio": 0.5}, ["up"], [["a"], ["b"]])), "has 2"),
        (
            config(
                section("weight_quantization", {"start_bits": 8, "target_bits": 8}, ["up"], quantize_groups=5)
            ),
            "must divide a weight's 48 numbers",
        ),
    ],
)
def test_a_section_that_is_wrong_is_refused(sections, says):
    with pytest.raises(ConfigError, match=says):
        init_compression(model(), sections)


def test_a_layer_in_two_groups_is_refused():
    twice = section("sparse_pruning", {"dense_ratio": 0.5}, ["up"])
    twice["sparse_pruning"]["different_groups"]["b"] = {"params": {"dense_ratio": 0.5}, "modules": ["*"]}
    with pytest.raises(ConfigError, match="`up` is in a and b"):
        init_compression(model(), config(twice))


def test_layers_of_gpt2_become_linear():
    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2))

        def forward(self, x):
            return x @ self.weight + self.bias

    net, x = nn.Sequential(Conv1D()), torch.randn(4, 3)
    before = net(x)
    assert torch.allclose(convert_conv1d_to_linear(net, Conv1D)(x), before)
    assert type(net[0]) is nn.Linear


def test_an_engine_counts_the_steps_and_learns_scores():
    """Three steps of an engine are those of a plain loop over the same layers."""
    pruning = config(
        section("sparse_pruning", {"dense_ratio": 0.5}, ["up"], method="topk", schedule_offset=1),
        section(
            "weight_quantization", {"start_bits": 8, "target_bits": 4, "quantization_period": 1}, ["down"]
        ),
    )
    compressed = init_compression(model(), pruning)
    plain = copy.deepcopy(compressed)
    settings = {"train_batch_size": 4, "zero_optimization": {"stage": 3}, "gradient_clipping": 0.0}
    engine, *_ = initialize(
        model=compressed, config=settings, optimizer=torch.optim.SGD(compressed.parameters(), 0.5)
    )
    optimizer, scheduler = torch.optim.SGD(plain.parameters(), 0.5), plain.compression_scheduler
    scheduler.model = plain
    for _ in range(3):
        loss, reference = engine(inputs()).square().mean(), plain(inputs()).square().mean()
        assert loss.item() == pytest.approx(reference.item(), abs=1e-6)
        engine.backward(loss)
        engine.step()
        optimizer.zero_grad()
        reference.backward()
        optimizer.step()
        scheduler.step()
    assert compressed.compression_scheduler.training_steps == 3


class Block(nn.Module):
    """A residual block as of a ResNet: the channels between its convolutions are its own."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x):
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


BLOCKS = (["layer....conv1"], [["layer....conv2", "layer....bn1"]])
ONE_BY_ONE = (["1.0.conv1", "2.0.conv1"], [["1.0.conv2", "1.0.bn1"], ["2.0.conv2", "2.0.bn1"]])


@over_table("method", ["l1", "topk"])
@over_table(("modules", "related"), [BLOCKS, ONE_BY_ONE])
def test_batch_norms_shrink_with_the_channels_before_them(modules, related, method):
    """They kept their sizes, and the cleaned model could not run; their shifts must not count either."""
    torch.manual_seed(2)
    net = nn.Sequential()
    for name in ("layer1", "layer2"):
        net.add_module(name, nn.Sequential(Block()))
    channels = config(section("channel_pruning", {"dense_ratio": 0.5}, modules, related, method=method))
    net, x = init_compression(net, channels), torch.randn(8, 3, 5, 5)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    shifts = net.layer1[0].bn1.bias
    assert shifts.count_nonzero() == 3  # a pruned channel has no gradient
    with torch.no_grad():
        shifts += 0.5
    before = net.eval()(x)
    cleaned = redundancy_clean(copy.deepcopy(net), channels)
    block = cleaned.layer2[0]
    shapes = {name: tuple(value.shape) for name, value in block.state_dict().items() if value.dim()}
    assert shapes["conv1.weight"] == (3, 3, 3, 3)
    assert shapes["bn1.running_var"] == shapes["bn1.bias"] == (3,)
    assert shapes["conv2.weight"] == (3, 3, 3, 3)
    assert type(block.bn1) is nn.BatchNorm2d
    assert block.bn1.num_features == 3
    assert torch.allclose(cleaned(x), before, atol=1e-5)


def test_a_norm_that_is_no_batch_norm_is_no_related_module():
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    rows = config(section("row_pruning", {"dense_ratio": 0.5}, ["0"], [["2", "1"]]))
    with pytest.raises(ConfigError, match="batch norm for each of the 1 pruned ones, but `1` names 0"):
        init_compression(net, rows)
