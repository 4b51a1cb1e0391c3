"""What a part of GPT hands on and adds to the loss, and what its batches count."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megazero.config.tree.model import ModelConfig
from megazero.errors import DataError
from megazero.layers.placement import Placement
from megazero.models.batch import Batch
from megazero.models.chunk import Slice
from megazero.models.gpt import GPT
from megazero.models.targets import Targets
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.param_spec import spec_of
from megazero.mpu.thread_group import ThreadWorld
from megazero.spec.resolve import model_spec
from tests.tables import over_table
from tests.zero.models import make_gpt

CPU = torch.device("cpu")
CONFIG = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=8)


def arrays(**more):
    text = np.arange(18).reshape(2, 9) % 13
    return {"tokens": text[:, :-1].copy(), "labels": text[:, 1:].copy(), **more}


@over_table("name", ["tokens", "labels"])
@over_table("bad", [13, -1, -100])
def test_ids_outside_the_vocabulary_are_refused_where_a_batch_is_made(name, bad):
    given = arrays()
    given[name][1, 3] = bad
    expected = rf"`{name}` must be in \[0, 13\), but is {bad} at \[1, 3\] of \[2, 8\]; check"
    with pytest.raises(DataError, match=expected):
        Batch.from_arrays(given, CPU, 13)
    given[name][1, 3] = 12
    batch = Batch.from_arrays(given, CPU, 13)
    assert {"tokens": batch.tokens, "labels": batch.learnt.labels}[name][1, 3] == 12


@over_table(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
@over_table("bad", [13, 15, 16, -1])
def test_foreign_tokens_of_a_batch_made_by_hand_are_refused(tp, sequence_parallel, bad):
    """Also ids of the padding, up to 16, and those that no slice of the vocabulary holds."""
    tokens = torch.ones(2, 8, dtype=torch.long)
    tokens[0, 3] = bad
    world, grid = ThreadWorld(tp), ProcessGrid(tp=tp)

    def work(rank: int) -> str:
        placement = Placement.of(
            thread_context(world, grid, rank), torch.float32, sequence_parallel=sequence_parallel
        )
        model = GPT(Slice(model_spec(CONFIG), (13, 16), placement))
        with pytest.raises(DataError) as raised:
            model.hidden(Batch(tokens))
        return str(raised.value)

    assert set(world.run(work)) == {
        "`tokens` must lie in [0, 13), but 1 do not; was the data made with another tokenizer?"
    }


def test_without_a_mask_every_position_counts():
    each = {"sequences": 2.0, "micro_batches": 1.0}
    assert Batch.from_arrays(arrays(), CPU, 13).counts == {"lm": 16.0, "tokens": 16.0, **each}
    assert Batch(torch.zeros(3, 5, dtype=torch.long)).counts["lm"] == 15.0


def test_a_mask_counts_by_its_weights():
    mask = np.zeros((2, 8), dtype=np.float32)
    mask[0, :3] = 1.0
    mask[1, 7] = 0.5
    batch = Batch.from_arrays(arrays(loss_mask=mask), CPU, 13)
    assert (batch.learnt.counted, batch.counts["lm"]) == (3.5, 3.5)


def test_a_mask_without_its_count_is_a_bug():
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(AssertionError, match="weights go with what they count"):
        Targets(tokens, torch.ones(1, 4))


def test_the_sum_is_over_what_counts():
    model = make_gpt()
    mask = (np.arange(16).reshape(2, 8) % 3 == 0).astype(np.float32)
    batch = Batch.from_arrays(arrays(loss_mask=mask), CPU, 13)
    result = model.run(batch)
    each = model.token_losses(model(batch), batch.learnt.labels).loss  # [s, b]
    assert result.hidden is None
    torch.testing.assert_close(result.terms, {"lm": each.t()[batch.learnt.weights.bool()].sum()})
    whole = model.run(Batch.from_arrays(arrays(), CPU, 13))
    torch.testing.assert_close(whole.terms, {"lm": each.sum()})


@pytest.mark.parametrize(("wide", "expected"), [(False, torch.bfloat16), (True, torch.float32)])
def test_the_residual_stream_is_fp32_where_asked_for(wide, expected):
    """Whatever the layers compute in; in 20 steps of half precision, no loss would show it."""
    config = CONFIG.model_copy(update={"fp32_residual_connection": wide})
    model = GPT(Slice(model_spec(config), (13, 16), Placement.of(solo_context(), torch.bfloat16)))
    entering = []
    model.layers[0].register_forward_pre_hook(lambda _, given: entering.append(given[0].dtype))
    left = model.hidden(Batch.from_arrays(arrays(), CPU, 13))
    assert (entering, left.dtype, model.hidden_dtype) == ([expected], expected, expected)


def test_initial_values_and_weight_decay_of_every_parameter():
    """GPT-2: 0.02, at the ends of the residual branches 0.02 / sqrt(2 L); norms and biases do not decay."""
    shape = ModelConfig(num_layers=8, hidden_size=8, num_attention_heads=2, seq_length=8)
    model = GPT(
        Slice(
            model_spec(shape),
            (13, 16),
            Placement.of(solo_context(), sequence_parallel=False, dtype=torch.float32),
        )
    )
    wide, narrow = ("normal", 0.02, True), ("normal", 0.005, True)
    ones, zeros = ("ones", 0.0, False), ("zeros", 0.0, False)
    norm = {"weight": ones, "bias": zeros}
    layer = {
        **{f"input_norm.{name}": each for name, each in norm.items()},
        "attention.qkv.weight": wide,
        "attention.qkv.bias": zeros,
        "attention.out.weight": narrow,
        "attention.out.bias": zeros,
        **{f"mlp_norm.{name}": each for name, each in norm.items()},
        "mlp.up.weight": wide,
        "mlp.up.bias": zeros,
        "mlp.down.weight": narrow,
        "mlp.down.bias": zeros,
    }
    expected = {
        "embedding.word.weight": wide,
        "embedding.position.weight": wide,
        **{f"layers.{i}.{name}": each for i in range(8) for name, each in layer.items()},
        **{f"final_norm.{name}": each for name, each in norm.items()},
    }
    specs = [spec_of(parameter) for parameter in model.parameters()]
    assert {each.name: (each.init.kind, each.init.std, each.weight_decay) for each in specs} == expected
    assert not any(each.shared or each.tied_with for each in specs)  # of a weight that is here only once


def test_deferred_weight_gradients_come_later_and_are_the_same():
    model, batch = make_gpt(), Batch.from_arrays(arrays(), CPU, 13)
    sums = model.run(batch).terms
    sums["lm"].backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    deferred = []
    sums = model.run(batch, deferred=deferred).terms
    sums["lm"].backward()
    waiting = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert waiting == [
        f"layers.{i}.{part}.weight"
        for i in range(len(model.layers))
        for part in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    ]
    for compute in deferred:
        compute()
    torch.testing.assert_close({n: p.grad for n, p in model.named_parameters()}, expected)
