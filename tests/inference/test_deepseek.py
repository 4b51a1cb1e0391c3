"""Generation with latent attention: what is kept is small, and no layout changes a token."""

from __future__ import annotations

import pytest
import torch

from megazero.inference.generate import generate
from megazero.inference.sampling import Sampling
from megazero.inference.staged import StagedModel
from megazero.layers.initialize import initialize
from megazero.layers.placement import Placement
from megazero.models.batch import Batch, Places
from megazero.models.chunk import EMBEDDING, HEAD, Slice
from megazero.models.gpt import GPT
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.spec.resolve import model_spec
from tests.inference.samples import LLAMA, PROMPTS, VOCAB, build, on_threads
from tests.inference.test_generate import NEW, slowly

V3 = LLAMA.model_copy(
    update={
        **{"multi_latent_attention": True, "num_query_groups": None, "q_lora_rank": 14, "kv_lora_rank": 10},
        **{"qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 5, "qk_layernorm": True},
        **{"rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 8, "mtp_num_layers": 1},
    }
)
GREEDY = Sampling(greedy=True)


def test_a_batch_equals_whole_forwards_one_by_one():
    model = build(V3)
    got = generate(model, PROMPTS, max_new_tokens=NEW, sampling=GREEDY)
    assert got == [slowly(model, prompt, i, GREEDY) for i, prompt in enumerate(PROMPTS)]
    assert len({tuple(row) for row in got}) == len(PROMPTS)
    assert generate(model, PROMPTS, max_new_tokens=NEW, sampling=GREEDY, prefill_chunk=2) == got


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_slices_give_the_same_tokens(sequence_parallel):
    def work(context):
        model = build(V3, context, sequence_parallel=sequence_parallel).without_sequence_parallelism()
        return generate(model, PROMPTS, max_new_tokens=NEW, sampling=GREEDY)

    alone = generate(build(V3), PROMPTS, max_new_tokens=NEW, sampling=GREEDY)
    assert on_threads(2, work) == [alone] * 2


def test_stages_and_sharers_give_the_same_tokens():
    """Two stages, each of whose two ranks keeps a share of the small vectors."""
    world, stage_of = ThreadWorld(4), (0, 1)

    def work(rank):
        context = thread_context(world, ProcessGrid(pp=2, cp=2), rank)
        placement = Placement.of(thread_context(ThreadWorld(1), ProcessGrid(), 0), torch.float32)
        parts = ((EMBEDDING, 0), (1, HEAD))[context.pp.rank]
        chunk = GPT(Slice(model_spec(V3), VOCAB, placement, parts=parts))
        initialize(chunk, 7, placement.place)
        staged = StagedModel({context.pp.rank: chunk}, stage_of, context.pp, context.groups["cp"])
        return generate(staged, PROMPTS, max_new_tokens=NEW, sampling=GREEDY)

    alone = generate(build(V3), PROMPTS, max_new_tokens=NEW, sampling=GREEDY)
    assert world.run(work) == [alone] * 4


def test_the_bytes_of_a_cache_are_those_of_small_vectors_and_rotated_keys():
    model = build(V3)
    staged = StagedModel.whole(model)
    cache = staged.new_cache(20)
    with torch.inference_mode():
        staged.logits(Batch(torch.tensor([[5, 17, 3], [1, 2, 3]]), places=Places(range(3))), cache)
    layers, positions, sequences, of_a_token, size = 2, 20, 2, 10 + 4, 4
    assert cache.bytes == layers * positions * sequences * of_a_token * size == 4480
    plain = StagedModel.whole(build(LLAMA.model_copy(update={"num_query_groups": 4})))
    keys = plain.new_cache(20)
    with torch.inference_mode():
        plain.logits(Batch(torch.tensor([[5, 17, 3], [1, 2, 3]]), places=Places(range(3))), keys)
    assert keys.bytes == 2 * 20 * 2 * (2 * 4 * 8) * 4 == 20480
