"""Generation against the plain meaning of it: run the whole sequence anew for every token."""

from __future__ import annotations

import pytest
import torch

from megazero.config.tree.recompute import RecomputeConfig
from megazero.errors import ConfigError, DataError
from megazero.inference.cache import KeyValueCache
from megazero.inference.generate import generate
from megazero.inference.sampling import Sampling, choose_tokens
from megazero.inference.staged import StagedModel
from megazero.layers.collectives import gather_features
from megazero.models.batch import Batch
from megazero.models.chunk import Slice
from megazero.models.gpt import GPT
from megazero.models.targets import Targets
from megazero.mpu.context import ParallelContext, make_context
from megazero.mpu.grid import ProcessGrid
from megazero.spec.resolve import model_spec
from tests.inference.samples import GPT2, LLAMA, LLAMA_FOUR_GROUPS, PROMPTS, VOCAB, build, on_threads
from tests.layouts.variants import VARIANTS as LAYERS
from tests.tables import over_table

GREEDY = Sampling(greedy=True)
DRAWN = Sampling(temperature=1.3, top_k=20, top_p=0.95, seed=5)
SPARSE = LLAMA.model_copy(
    update={
        "sparse_attention": "bigbird",
        "sparse_block": 2,
        "sparse_num_random_blocks": 1,
        "sparse_different_layout_per_head": True,
    }
)
SHAPES = over_table(
    "config", [GPT2, LLAMA, LLAMA_FOUR_GROUPS, SPARSE], ids=["gpt2", "llama", "mha", "sparse"]
)
RULES = over_table("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
NEW = 8


@torch.no_grad()
def slowly(model: GPT, prompt: list[int], number: int, sampling: Sampling, new: int = NEW) -> list[int]:
    """No cache, no batch: the definition."""
    row = list(prompt)
    for _ in range(new):
        logits = model(Batch(torch.tensor([row])))[-1, :, : model.vocab_size]
        row.append(int(choose_tokens(logits, sampling, [number], len(row))))
    return row[len(prompt) :]


@SHAPES
@RULES
def test_a_ragged_batch_with_cache_equals_whole_forwards_one_by_one(config, sampling):
    model = build(config)
    got = generate(model, PROMPTS, max_new_tokens=NEW, sampling=sampling)
    assert got == [slowly(model, prompt, i, sampling) for i, prompt in enumerate(PROMPTS)]
    assert len({tuple(row) for row in got}) == len(PROMPTS)  # the prompts matter to this model


@SHAPES
@RULES
def test_a_batch_equals_its_prompts_alone(config, sampling):
    model = build(config)
    together = generate(model, PROMPTS, max_new_tokens=NEW, sampling=sampling)
    for i, prompt in enumerate(PROMPTS):
        alone = generate(model, [prompt], max_new_tokens=NEW, sampling=sampling, numbers=[i])
        assert alone == together[i : i + 1]


@SHAPES
@RULES
@over_table("chunk", [1, 2, 3, 64])
def test_prompts_in_chunks_give_the_same_tokens(config, sampling, chunk):
    model = build(config)
    whole = generate(model, PROMPTS, max_new_tokens=NEW, sampling=sampling)
    assert generate(model, PROMPTS, max_new_tokens=NEW, sampling=sampling, prefill_chunk=chunk) == whole


@SHAPES
def test_a_chunked_prompt_has_the_logits_of_one_pass_and_no_step_is_longer(config):
    model, prompt = build(config), torch.arange(12).tolist()
    steps: list[int] = []

    def logits(chunk: int | None) -> torch.Tensor:
        seen = []
        staged = StagedModel.whole(model)
        answer = staged.logits

        def spy(batch: Batch, cache: KeyValueCache) -> torch.Tensor:
            steps.append(batch.tokens.shape[1])
            seen.append(answer(batch, cache))
            return seen[-1]

        staged.logits = spy
        generate(staged, [prompt], max_new_tokens=1, sampling=GREEDY, prefill_chunk=chunk)
        return seen[-1]

    whole = logits(None)
    assert steps == [12]
    steps.clear()
    torch.testing.assert_close(logits(5), whole, rtol=1e-5, atol=2e-5)  # logits reach 5
    assert steps == [5, 5, 2]


@pytest.mark.parametrize("chunk", [0, -3])
def test_a_chunk_has_a_token(chunk):
    with pytest.raises(ConfigError, match=f"`prefill_chunk` must be at least 1, but is {chunk}"):
        generate(build(GPT2), PROMPTS, max_new_tokens=1, prefill_chunk=chunk)


VARIANTS = {
    "window": LLAMA.model_copy(update={"window_size": (3, 0)}),
    "first": LLAMA.model_copy(
        update={"window_size": (2, 0), "window_attn_skip_freq": (0, 1), "window_sink_tokens": 2}
    ),
    "alibi": GPT2.model_copy(update={"position_embedding_type": "alibi", "window_size": (4, 0)}),
    "offset": GPT2.model_copy(update={"softmax_type": "learnable"}),
    **{name: LLAMA.model_copy(update=settings) for name, settings in LAYERS.items() if name},
    "all": GPT2.model_copy(
        update={
            **{"position_embedding_type": "alibi", "softmax_type": "off-by-one"},
            **{"window_size": (5, -1), "window_attn_skip_freq": (2,)},
        }
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_attention_equal_whole_forwards(name):
    """Keys that no later token sees are dropped; nothing comes out otherwise."""
    model = build(VARIANTS[name])
    got = generate(model, PROMPTS, max_new_tokens=14, sampling=DRAWN)
    assert got == [slowly(model, prompt, i, DRAWN, new=14) for i, prompt in enumerate(PROMPTS)]


def test_variants_of_attention_on_two_ranks():
    def work(context: ParallelContext) -> list[list[int]]:
        model = build(VARIANTS["all"], context)
        return generate(model, PROMPTS, max_new_tokens=NEW, sampling=DRAWN)

    (alone,), both = on_threads(1, work), on_threads(2, work)
    assert both == [alone, alone]


def test_a_seed_repeats_itself_and_another_differs():
    model = build(GPT2)
    first, again, other = (
        generate(model, PROMPTS, max_new_tokens=NEW, sampling=Sampling(seed=seed)) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_equal_prompts_draw_different_continuations():
    rows = generate(build(GPT2), [[5, 6]] * 4, max_new_tokens=12, sampling=Sampling(seed=1))
    assert len({tuple(row) for row in rows}) == 4


def generate_on_rank(context: ParallelContext) -> list[list[list[int]]]:
    """Both shapes, both rules, and both shapes built for sequence-parallel training."""
    results = []
    for config in (GPT2, LLAMA_FOUR_GROUPS):
        plain = build(config, context)
        trained = build(config, context, sequence_parallel=True).without_sequence_parallelism()
        results += [
            generate(model, PROMPTS, max_new_tokens=NEW, sampling=sampling)
            for model in (plain, trained)
            for sampling in (GREEDY, DRAWN)
        ]
    return results


@pytest.fixture(scope="module")
def serial() -> list[list[list[int]]]:
    return on_threads(1, generate_on_rank)[0]


@pytest.mark.parametrize("tp", [2, 4])
def test_every_tensor_parallel_rank_gives_the_serial_tokens(tp, serial):
    assert serial[0] != serial[1]
    for result in on_threads(tp, generate_on_rank):
        assert result == serial


def test_grouped_queries_over_two_ranks():
    expected = generate(build(LLAMA), PROMPTS, max_new_tokens=NEW, sampling=DRAWN)
    work = lambda context: generate(build(LLAMA, context), PROMPTS, max_new_tokens=NEW, sampling=DRAWN)  # noqa: E731
    assert on_threads(2, work) == [expected] * 2


def _gloo(rank: int, world_size: int) -> list[list[list[int]]]:
    from datetime import timedelta

    from megazero.mpu.torch_group import open_group

    def open_(name: str, ranks: tuple[int, ...]):
        return open_group(name, rank, ranks, timedelta(seconds=30))

    context = make_context(ProcessGrid(tp=world_size), rank, torch.device("cpu"), open_)
    return generate_on_rank(context)


@pytest.mark.gloo
def test_gloo_processes_give_the_serial_tokens(pool, serial):
    assert pool.run(_gloo, 2) == [serial] * 2


def test_a_sequence_ends_at_eod_and_the_others_go_on():
    model = build(GPT2)
    free = generate(model, PROMPTS, max_new_tokens=NEW, sampling=DRAWN)
    eod = free[0][3]

    def cut(row: list[int]) -> list[int]:
        return row[: row.index(eod)] if eod in row else row

    stopped = generate(model, PROMPTS, max_new_tokens=NEW, sampling=DRAWN, eod=eod)
    assert stopped == [cut(row) for row in free]
    assert len(stopped[0]) <= 3
    assert max(map(len, stopped)) == NEW


def test_generation_ends_with_the_last_live_sequence():
    model = build(GPT2)
    eod = generate(model, [[5, 6]], max_new_tokens=1, sampling=GREEDY)[0][0]
    calls = []
    model.head.register_forward_pre_hook(lambda *_: calls.append(1))
    assert generate(model, [[5, 6]], max_new_tokens=20, sampling=GREEDY, eod=eod) == [[]]
    assert len(calls) == 1


def test_tokens_are_told_as_they_come():
    heard: dict[int, list[int]] = {i: [] for i in range(len(PROMPTS))}
    order = []

    def on_token(i: int, token: int) -> None:
        heard[i].append(token)
        order.append(i)

    got = generate(build(GPT2), PROMPTS, max_new_tokens=2, sampling=GREEDY, on_token=on_token)
    assert [heard[i] for i in range(len(PROMPTS))] == got
    # By position: the single token first, then lengths 3 and 4 side by side, at last the longest.
    assert order == [1, 1, 2, 2, 3, 3, 0, 0]


def test_padding_of_the_vocabulary_is_never_drawn():
    model = build(LLAMA)
    with torch.no_grad():
        model.head.weight[VOCAB[0] :] = 1e3 * model.head.weight[0]  # either sign: huge for some states
    for sampling in (GREEDY, DRAWN):
        rows = generate(model, PROMPTS, max_new_tokens=NEW, sampling=sampling)
        assert max(max(row) for row in rows) < VOCAB[0]
        assert rows == generate(build(LLAMA), PROMPTS, max_new_tokens=NEW, sampling=sampling)


@pytest.mark.parametrize("mode", [True, False])
def test_the_model_is_left_as_it_was(mode):
    model = build(GPT2).train(mode)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generate(model, PROMPTS, max_new_tokens=4, sampling=DRAWN)
    assert model.training is mode
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    sums = model.run(Batch(torch.tensor([[1, 2]]), Targets(torch.tensor([[2, 3]])))).terms
    loss = sums["lm"]
    loss.backward()
    assert model.embedding.word.grad is not None


def test_recompute_settings_do_not_matter():
    plain = build(GPT2)
    expected = generate(plain, PROMPTS, max_new_tokens=NEW, sampling=DRAWN)
    for granularity in ("selective", "full"):
        model = GPT(Slice(model_spec(GPT2), VOCAB, plain.placement, RecomputeConfig(granularity=granularity)))
        model.load_state_dict(plain.state_dict())
        assert generate(model, PROMPTS, max_new_tokens=NEW, sampling=DRAWN) == expected


def test_the_last_learned_position_can_be_used_and_no_more():
    model = build(GPT2)  # 24 positions
    prompt = list(range(20))
    assert len(generate(model, [prompt], max_new_tokens=5, sampling=GREEDY)[0]) == 5
    with pytest.raises(ConfigError, match="must be at most the 24 learned positions, but is 25"):
        generate(model, [[1], prompt], max_new_tokens=6, sampling=GREEDY)


def test_rotary_positions_go_on_beyond_the_trained_length():
    assert len(generate(build(LLAMA), [[1, 2]], max_new_tokens=30, sampling=GREEDY)[0]) == 30


@over_table(
    ("prompts", "fields", "error", "message"),
    [
        ([[1], []], {}, DataError, "prompt 1 is empty"),
        ([[1, 53]], {}, DataError, r"tokens in \[0, 53\), but those of prompt 0 range from 1 to 53"),
        ([[2], [-1]], {}, DataError, "prompt 1 range from -1 to -1"),
        ([[1]], {"max_new_tokens": 0}, ConfigError, "`max_new_tokens` must be at least 1, but is 0"),
        ([[1]], {"numbers": [1, 2]}, ConfigError, r"`numbers` must be one per prompt \(1\), but are 2"),
    ],
)
def test_bad_requests_are_refused(prompts, fields, error, message):
    with pytest.raises(error, match=message):
        generate(build(GPT2), prompts, **{"max_new_tokens": 2, **fields})


def test_no_prompts_give_no_text():
    assert generate(build(GPT2), [], max_new_tokens=2) == []


def test_a_sequence_parallel_model_is_refused_and_its_twin_shares_its_weights():
    def work(context: ParallelContext) -> None:
        model = build(GPT2, context, sequence_parallel=True)
        with pytest.raises(ConfigError, match="`sequence_parallel` must be off to generate"):
            generate(model, [[1]], max_new_tokens=1)
        twin = model.without_sequence_parallelism()
        assert twin is twin.without_sequence_parallelism()
        ours, theirs = model.state_dict(), twin.state_dict()
        assert {n: v.data_ptr() for n, v in ours.items()} == {n: v.data_ptr() for n, v in theirs.items()}

    on_threads(2, work)


def test_gathered_logits_are_the_serial_ones():
    tokens = torch.tensor([PROMPTS[0]])
    expected = build(GPT2)(Batch(tokens)).detach()

    def work(context: ParallelContext) -> torch.Tensor:
        with torch.no_grad():
            return gather_features(build(GPT2, context)(Batch(tokens)), context.tp)

    for got in on_threads(4, work):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_layout_ends_with_the_positions_that_it_was_made_for():
    with pytest.raises(ConfigError, match="at most the 24 positions of the sparse attention's layout"):
        generate(build(SPARSE), [[1] * 20], max_new_tokens=6)
    assert len(generate(build(SPARSE), [[1] * 20], max_new_tokens=5)[0]) == 5
