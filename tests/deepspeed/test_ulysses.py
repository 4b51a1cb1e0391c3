"""Models of transformers whose sequences ranks share: losses, gradients and masks are those of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from megazero.deepspeed.initialize import initialize
from megazero.deepspeed.sequence.hugging_face import UlyssesSPAttentionHF
from megazero.deepspeed.sequence.masks import PieceMask
from megazero.deepspeed.zero.gathered import GatheredParameters
from megazero.errors import ConfigError
from megazero.mpu.group import Group
from megazero.mpu.thread_group import ThreadWorld

transformers = pytest.importorskip("transformers")

LENGTH, VOCABULARY, STEPS, RATE, CLIP = 16, 61, 3, 0.2, 0.3
SHAPE = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3}


def sdpa_attention_forward() -> Any:
    """The attention that models of transformers call; its modules take seconds to import."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


def masking() -> Any:
    """The module that makes their masks."""
    import transformers.masking_utils

    return transformers.masking_utils


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, **HEADS, attn_implementation="sdpa", use_cache=False)
    return transformers.LlamaForCausalLM(config)


def sample(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and labels [1, s]; every other sample is two documents, and labels are few."""
    ids = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(number))
    cut = 5 * (number % 2)
    positions = torch.cat((torch.arange(cut), torch.arange(LENGTH - cut))).unsqueeze(0)
    labels = pad(ids[:, 1:], (0, 1), value=-100)
    labels[:, : 3 * number] = -100  # the first ranks have none of the later samples
    return ids, positions, labels


def serial(replicas: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The losses, gradient norms and weights of one rank, which takes each replica's sample."""
    model, losses, norms = llama(), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = []
        for replica in range(replicas):
            ids, positions, labels = sample(step * replicas + replica)
            logits = model(ids, position_ids=positions).logits
            parts.append(cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100))
        loss = torch.stack(parts).mean()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(parts[0].item())
    return losses, norms, dict(model.named_parameters())


def shared_losses(logits: Tensor, labels: Tensor, group: Any) -> dict[str, Tensor]:
    """Losses that are right where gradients are means over ranks: the tutorial's, and a local one."""
    total = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    count = (labels != -100).sum()
    torch.distributed.all_reduce(count, group=group)
    return {
        "gathered": torch.stack(differentiable.all_gather(total, group=group)).sum() / count,
        "added": total * group.size() / count,
    }


def _trains(rank: int, size: int, ranks: int, stage: int, recipe: str) -> None:
    losses, norms, weights = serial(size // ranks)
    model = llama()
    attentions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", ranks, 1, LENGTH, False)
    try:
        mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", ranks, 1)
        assert not isinstance(attentions["sdpa"].attn, UlyssesSPAttentionHF)
        config = {
            "train_batch_size": size // ranks,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "sequence_parallel_size": ranks,
            "gradient_clipping": CLIP,
            "zero_allow_untested_optimizer": True,
            "optimizer": {"type": "SGD", "params": {"lr": RATE}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config, mpu=mpu)
        assert mpu.get_sequence_data_parallel_world_size() == size == engine.context.replica.size
        place, replica = mpu.get_sequence_parallel_rank(), mpu.get_data_parallel_rank()
        group = mpu.get_sequence_parallel_group()
        for step in range(STEPS):
            ids, positions, labels = (
                x.chunk(ranks, 1)[place] for x in sample(step * (size // ranks) + replica)
            )
            given = shared_losses(engine(ids, position_ids=positions).logits, labels, group)
            engine.backward(given[recipe])
            engine.step()
            if replica == 0:
                assert given["gathered"].item() == pytest.approx(losses[step], rel=1e-5)
            assert float(engine.get_global_grad_norm()) == pytest.approx(norms[step], rel=1e-5)
        for name, param in model.named_parameters():
            with GatheredParameters(param):
                torch.testing.assert_close(param.detach(), weights[name].detach(), rtol=1e-4, atol=1e-6)
    finally:
        del attentions["sdpa"]
        del masking().ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("size", "ranks"),
    [(2, 2), pytest.param(4, 4, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_a_llama_trains_as_on_one_rank(pool, size, ranks, stage):
    """Gradient norms and SGD's weights show any factor. On 4 ranks, 3 heads of keys go to 4."""
    # Over Gloo, torch's differentiable all_gather has no backward in a group that is not the world.
    pool.run(_trains, size, ranks, stage, "added" if stage == 1 or ranks < size else "gathered")


class Layer(nn.Module):
    """What transformers' attention asks a layer for."""

    def __init__(self, together: int):
        super().__init__()
        self.is_causal, self.num_key_value_groups = True, together


def drawn(batch: int, seed: int = 1) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    counts = HEADS["num_attention_heads"], *[HEADS["num_key_value_heads"]] * 2
    return [torch.randn(batch, count, LENGTH, 4, generator=draw, dtype=torch.float64) for count in counts]


def asked(positions: Tensor, length: int, padding: Tensor | None, **config: Any) -> Any:
    """What a model asks the table of masks for, with or without a window."""
    shape = transformers.LlamaConfig(attn_implementation="sdpa", **config)
    ask = (
        masking().create_sliding_window_causal_mask
        if "sliding_window" in config
        else masking().create_causal_mask
    )
    return ask(shape, torch.zeros(len(positions), length, 1), padding, None, position_ids=positions)


def attended(
    monkeypatch, parts: list[Tensor], positions: Tensor, padding: Tensor | None, ranks: int, **config: Any
) -> Tensor:
    """[b, s, n d], by so many ranks that are threads; one asks transformers alone."""
    attend = sdpa_attention_forward()
    layer = [Layer(2) for _ in range(ranks)]
    if ranks == 1:
        mask = asked(positions, LENGTH, padding, **config)
        return attend(layer[0], *parts, mask, position_ids=positions)[0].flatten(2)
    threads = ThreadWorld(ranks)

    def work(rank: int) -> Tensor:
        group: Group = threads.group("cp", rank, tuple(range(ranks)))
        own = [x.chunk(ranks, 2)[rank] for x in parts]
        place = positions.chunk(ranks, 1)[rank]
        kept = None if padding is None else padding.chunk(ranks, 1)[rank]
        mask = asked(place, LENGTH // ranks, kept, **config)
        assert isinstance(mask, PieceMask)
        ulysses = UlyssesSPAttentionHF(attend, group, None, False)
        result = ulysses(layer[rank], *own, mask, position_ids=place)[0]
        assert layer[rank].num_key_value_groups == 2
        assert torch.equal(ulysses(layer[rank], *own, mask, position_ids=place)[0], result)
        return result.flatten(2)

    with monkeypatch.context() as patch:
        table = masking().ALL_MASK_ATTENTION_FUNCTIONS
        patch.setitem(table._local_mapping, "sdpa", lambda **call: PieceMask(masking().sdpa_mask, call))
        return torch.cat(threads.run(work), 1)


PLAIN = torch.arange(LENGTH).expand(2, -1)
PACKED = torch.cat((torch.arange(7), torch.arange(6), torch.arange(3))).expand(2, -1)
PADDED = torch.ones(2, LENGTH, dtype=torch.long)
PADDED[0, :3], PADDED[1, :1] = 0, 0


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("positions", "padding", "config"),
    [
        (PLAIN, None, {}),
        (PACKED, None, {}),
        (PLAIN, PADDED, {}),
        (PLAIN, None, {"sliding_window": 3}),
        (PACKED, None, {"sliding_window": 3}),
        (PLAIN, PADDED, {"sliding_window": 5}),
    ],
)
def test_windows_documents_and_padding_are_those_of_one_rank(monkeypatch, ranks, positions, padding, config):
    parts = drawn(2)
    one = attended(monkeypatch, parts, positions, padding, 1, **config)
    many = attended(monkeypatch, parts, positions, padding, ranks, **config)
    if padding is None:
        torch.testing.assert_close(many, one)
    else:  # a padded query has no key, and its result no meaning
        kept = padding.bool()
        torch.testing.assert_close(many[kept], one[kept])


def test_keys_of_another_document_and_outside_of_the_window_are_not_seen(monkeypatch):
    for positions, config, unseen in ((PACKED, {}, 8), (PLAIN, {"sliding_window": 3}, 8)):
        parts, others = drawn(2), drawn(2)
        for x in others[1:]:
            x[:, :, 2] += 7.0
        before, after = (attended(monkeypatch, x, positions, None, 2, **config) for x in (parts, others))
        assert torch.equal(before[:, unseen:], after[:, unseen:])
        assert not torch.equal(before[:, 2:5], after[:, 2:5])


def ulysses_of(world: ThreadWorld, rank: int, **changes: Any) -> UlyssesSPAttentionHF:
    given = {"seq_length": None, "disable_in_eval": False, **changes}
    return UlyssesSPAttentionHF(lambda *_, **__: None, world.group("cp", rank, (0, 1)), **given)


def refusal(mask: Any = None, positions: Any = "whole", **more: Any) -> str:
    """What two ranks say to a call."""
    world, changes = ThreadWorld(2), {key: more.pop(key) for key in ("seq_length",) if key in more}

    def work(rank: int) -> str:
        own = PLAIN[:1].chunk(2, 1)[rank] if isinstance(positions, str) else positions
        given = mask(own) if callable(mask) else mask
        query, ulysses = torch.ones(1, 2, LENGTH // 2, 4), ulysses_of(world, rank, **changes)
        with pytest.raises(ConfigError) as error:
            ulysses(Layer(1), query, query, query, given, position_ids=own, **more)
        return str(error.value)

    first, second = world.run(work)
    assert first == second
    return first


def bidirectional(own: Tensor) -> PieceMask:
    call = {"batch_size": 1, "q_length": 8, "kv_length": 8, "use_vmap": False, "attention_mask": None}
    return PieceMask(masking().sdpa_mask, {**call, "mask_function": masking().bidirectional_mask_function})


def test_what_cannot_be_honoured_is_refused_by_name():
    piece = torch.arange(LENGTH // 2).unsqueeze(0)
    assert refusal(positions=piece).startswith("`position_ids` must count through the whole sequence")
    assert refusal(positions=None).startswith("`position_ids` must reach the attention")
    assert refusal(positions=torch.zeros(3, 1, 8)).startswith("`position_ids` must be [b, s]")
    assert refusal(torch.ones(1, 1, 8, 8)).startswith("`attention_mask` must be [b, s/p] or left out")
    assert "asks for bidirectional_mask_function;" in refusal(bidirectional)
    assert refusal(position_bias=torch.ones(1)).startswith("`position_bias` must be left out")
    assert refusal(cu_seq_lens_q=torch.ones(1)).startswith("`cu_seq_lens_q` must be left out")
    assert refusal(seq_length=32).startswith("`seq_length` must be that of all sequences, but is 32")


def chunked(own: Tensor) -> PieceMask:
    function = masking().chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    call = {"batch_size": 1, "q_length": 8, "kv_length": 8, "attention_mask": None}
    return PieceMask(masking().sdpa_mask, {**call, "mask_function": function})


def cached(own: Tensor) -> PieceMask:
    call = {"batch_size": 1, "q_length": 8, "kv_length": 9, "attention_mask": None}
    return PieceMask(masking().sdpa_mask, {**call, "mask_function": masking().causal_mask_function})


def overlaid(own: Tensor) -> PieceMask:
    call = {"batch_size": 1, "q_length": 8, "kv_length": 8, "attention_mask": None, "use_vmap": True}
    return PieceMask(masking().sdpa_mask, {**call, "mask_function": masking().causal_mask_function})


def test_masks_of_other_kinds_are_refused_by_name():
    assert "asks for chunked_overlay;" in refusal(chunked)
    assert "asks for or_mask_function or and_mask_function;" in refusal(overlaid)
    assert refusal(cached).startswith("`past_key_values` must be empty")


def test_a_module_that_is_not_in_training_may_attend_alone():
    world, parts = ThreadWorld(2), drawn(1)
    attend = sdpa_attention_forward()
    layer = Layer(2).eval()
    ulysses = UlyssesSPAttentionHF(attend, world.group("cp", 0, (0, 1)), None, True)
    assert torch.equal(ulysses(layer, *parts, None)[0], attend(layer, *parts, None)[0])


@pytest.mark.parametrize(
    ("attention", "more", "words"),
    [
        ("eager", {}, "`core_attn_implementation` must be one of .*sdpa.*, but is eager"),
        ("flash_attention_2", {}, r"must be the attention that the model uses \(sdpa\)"),
        ("sdpa", {"seq_length": 9, "seq_length_is_variable": False}, r"multiple of .*\(2\).*, but is 9"),
        ("sdpa", {"seq_length_is_variable": False}, "but is None"),
    ],
)
def test_registrations_that_cannot_work_are_refused(attention, more, words):
    with pytest.raises(ConfigError, match=words):
        UlyssesSPAttentionHF.register_with_transformers(llama(), attention, 2, 1, **more)


def test_one_rank_registers_nothing():
    assert UlyssesSPAttentionHF.register_with_transformers(llama(), "sdpa", 1, 1) is None
