"""The first rank asks, all compute: scores and texts are those of one process, and end where they should."""

from __future__ import annotations

import pytest
import torch

from megazero.config.derive import PipelineShape
from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.errors import DataError
from megazero.harness.answers import Answers, Continued, Leading, follow
from megazero.harness.scoring import Scorer
from megazero.harness.text import HarnessTokenizer
from megazero.inference.staged import StagedModel
from megazero.mpu.context import thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.parts.chunks import build_chunks, schedule_of
from megazero.train.parts.vocabulary import Vocabulary
from tests.layouts.layout import Layout

BYTES = build_tokenizer(TokenizerSpec("ByteLevelTokenizer"))
GREEDY = {"greedy": True}
ASKED = [
    Continued(list(b"ab"), 8, [], GREEDY),
    Continued(list(b"xyz"), 5, [], {"seed": 3, "temperature": 1.5}),
    Continued(list(b"ab"), 3, [], GREEDY),
]


def answered(layout: Layout, asked: list[Continued]) -> tuple[list[str], list[float]]:
    """The first rank's texts and scores; the others follow it."""
    world, config = ThreadWorld(layout.world_size), layout.config()
    model_config = config.model.model_copy(update={"init_method_std": 0.5})
    config = config.model_copy(update={"model": model_config})
    results = []

    def work(rank: int) -> str:
        context = thread_context(world, layout.grid, rank)
        chunks = build_chunks(config, Vocabulary(257, 320, None, None), context, torch.device("cpu"))
        model = StagedModel(chunks, schedule_of(PipelineShape.of(config)).stage_of, context.pp)
        answers = Answers(Scorer(model, context), HarnessTokenizer(BYTES))
        if rank:
            return follow(answers)
        leading = Leading(answers)
        results.append(leading.texts(asked))
        results.append([score.logprob for score in leading.score([(b"ab", b"cd"), (b"x", b"yz")])])
        with pytest.raises(DataError):
            leading.score([([1], [999])])  # all ranks refuse it, and go on
        leading.score([([1], [2])])
        leading.close("done")
        return "done"

    assert set(world.run(work)) == {"done"}
    return results[0], results[1]


def test_ranks_follow_the_first_one_on_every_layout():
    texts, scores = answered(Layout(layers=2, shape="llama"), ASKED)
    assert texts[0].startswith(texts[2])
    for sizes in ({"tp": 2}, {"pp": 2}, {"dp": 2}):
        others, their_scores = answered(Layout(layers=2, shape="llama", **sizes), ASKED)
        assert others == texts
        assert their_scores == pytest.approx(scores, rel=1e-5)


def test_a_text_ends_before_the_earliest_of_its_stop_strings():
    layout = Layout(layers=2, shape="llama")
    (whole,), _ = answered(layout, ASKED[:1])
    assert len(whole) >= 4
    stops = [whole[3:5], whole[2:4], "never there"]
    (cut,), _ = answered(layout, [Continued(list(b"ab"), 8, stops, GREEDY)])
    assert cut == whole[: min(whole.find(stop) for stop in stops[:2])]


def test_a_tokenizer_without_special_tokens_in_texts():
    text = HarnessTokenizer(BYTES)
    assert (text.end, text.prefix, text.encode("hé")) == (256, 256, [104, 195, 169])
    assert text.decode([104, 256, 105]) == "hi"
    with pytest.raises(DataError, match="chat template"):
        text.chat([{"role": "user", "content": "x"}], answer=True)


def test_a_tokenizer_json_knows_special_tokens_its_beginning_and_chats(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    whole.chat_template = "{% for m in messages %}<s> {{ m.content }} </s>{% endfor %}"
    whole.save_pretrained(tmp_path)
    plain = build_tokenizer(TokenizerSpec("HFTokenizer", model=str(tmp_path)))
    text = HarnessTokenizer(plain)
    assert (text.prefix, text.end) == (1, 2)
    assert text.encode("a b") == [1, 3, 4]
    assert text.encode("a b", special=False) == [3, 4]
    chat = text.chat([{"role": "user", "content": "a"}], answer=True)
    assert text.encode(chat) == [1, 3, 2]  # the template's beginning is the only one
    assert HarnessTokenizer(plain, add_bos=False).encode("a") == [3]
