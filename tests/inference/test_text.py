"""Text in, text out, with tokenizers that need no files."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from megazero.config.tree.model import ModelConfig
from megazero.data.tokenizers.base import Tokenizer
from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.errors import ConfigError, DataError
from megazero.inference.generate import generate
from megazero.inference.sampling import Sampling
from megazero.inference.text import TextGenerator
from megazero.layers.initialize import initialize
from megazero.layers.placement import Placement
from megazero.models.chunk import Slice
from megazero.models.gpt import GPT
from megazero.mpu.context import solo_context
from megazero.spec.resolve import model_spec
from tests.inference.samples import LLAMA

BYTES = build_tokenizer(TokenizerSpec("ByteLevelTokenizer"))
PROMPTS = ["def f(", "", "naïve", "x"]


def byte_model(vocab: int = 257) -> GPT:
    model = GPT(Slice(model_spec(LLAMA), (vocab, 384), Placement.of(solo_context(), torch.float32)))
    initialize(model, 3, model.placement.place)
    return model


def test_text_is_the_decoded_continuation_of_the_encoded_prompt():
    model, sampling = byte_model(), Sampling(seed=2)
    texts = TextGenerator(model, BYTES).complete(PROMPTS, max_new_tokens=9, sampling=sampling)
    prompts = [list(prompt.encode()) or [256] for prompt in PROMPTS]
    rows = generate(model, prompts, max_new_tokens=9, sampling=sampling, eod=256)
    assert texts == [bytes(row).decode(errors="replace") for row in rows]
    assert all(texts)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_batch_size_changes_nothing(batch_size):
    generator = TextGenerator(byte_model(), BYTES)
    together = generator.complete(PROMPTS, max_new_tokens=9)
    assert generator.complete(PROMPTS, max_new_tokens=9, batch_size=batch_size) == together


def test_ids_that_only_the_model_knows_are_never_drawn():
    model = byte_model(vocab=384)
    rows = generate(model, [[1]], max_new_tokens=40, sampling=Sampling(seed=1))
    assert max(rows[0]) > 256  # left to itself, it draws them
    TextGenerator(model, BYTES).complete(["a"], max_new_tokens=40, sampling=Sampling(seed=1))


class Words(Tokenizer):
    """Like sentencepiece: a blank before each word, taken off at the start of what is decoded."""

    name, vocab_size, eod, special_ids = "Words", 4, None, {}

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f" {i}" for i in ids).removeprefix(" ")


def test_the_blank_between_prompt_and_text_is_kept():
    text = TextGenerator(byte_model(), Words()).complete(["1 2"], max_new_tokens=2)[0]
    assert text[0] == " "
    assert len(text) == 4


def test_an_empty_prompt_needs_an_end_of_document():
    with pytest.raises(DataError, match="without an end-of-document token, but prompt 1 is ''"):
        TextGenerator(byte_model(), Words()).complete(["1", ""], max_new_tokens=2)


def test_a_larger_tokenizer_is_refused():
    with pytest.raises(DataError, match="`tokenizer` must have at most the model's 200 tokens, but has 257"):
        TextGenerator(byte_model(vocab=200), BYTES)


def test_a_batch_size_below_one_is_refused():
    with pytest.raises(ConfigError, match="`batch_size` must be at least 1, but is 0"):
        TextGenerator(byte_model(), BYTES).complete(["a"], max_new_tokens=1, batch_size=0)


def test_a_model_with_learned_positions_says_when_the_text_is_too_long():
    config = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=6)
    model = GPT(Slice(model_spec(config), (257, 384), Placement.of(solo_context(), torch.float32)))
    initialize(model, 3, model.placement.place)
    with pytest.raises(ConfigError, match="at most the 6 learned positions, but is 8"):
        TextGenerator(model, BYTES).complete(["abcde"], max_new_tokens=4)
