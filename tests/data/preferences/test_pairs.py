"""Pairs of answers: every form, truncation that never touches an answer, and lines that are no pairs."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("transformers")

from megazero.data.conversations.answers import ConversationEncoder
from megazero.data.labelled.dataset import EpochOrder
from megazero.data.preferences.dataset import PairSamples
from megazero.data.preferences.pairs import Pairs, encode_pair, joined
from megazero.data_tools.conversations import read_each
from megazero.errors import DataError
from tests.data.conversations.templates import CHATML, LLAMA_3
from tests.data.conversations.tokenizer import byte_level, write_folder
from tests.tables import over_table

QUESTION = {"role": "user", "content": "What is the capital of France?"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


MESSAGES = {"chosen": [QUESTION, said("Paris.")], "rejected": [QUESTION, said("Rome, I think.")]}
PROMPTED = {"prompt": [QUESTION], "chosen": [said("Paris.")], "rejected": [said("Rome, I think.")]}
TEXT = {"prompt": "The capital is", "chosen": " Paris", "rejected": " Rome.", "margin": 2}


@pytest.fixture(scope="module", params=[CHATML, LLAMA_3], ids=["chatml", "llama-3"])
def encoder(request, tmp_path_factory) -> ConversationEncoder:
    eos = "<|im_end|>" if request.param is CHATML else "<|eot_id|>"
    return ConversationEncoder(
        str(write_folder(tmp_path_factory.mktemp("t"), byte_level(), request.param, eos=eos))
    )


def pairs_of(encoder, *rows: object, length: int = 99) -> Pairs:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    numbered = [(f"f.jsonl, line {i}", line) for i, line in enumerate(lines, 1)]
    return joined(read_each(numbered, lambda line: encode_pair(line, encoder)), encoder.vocab_size, length)


def rows_of(encoder, pairs: Pairs) -> list[tuple[str, str]]:
    """Prompt and answer of each row, as text."""
    tokenizer = encoder._tokenizer
    rows = [pairs.ids[a:b] for a, b in zip(pairs.offsets[:-1], pairs.offsets[1:], strict=True)]
    return [
        (tokenizer.decode(row[:begin]), tokenizer.decode(row[begin:]))
        for row, begin in zip(rows, pairs.answers, strict=True)
    ]


def test_both_forms_of_messages_are_the_same_and_an_answer_ends_with_one_end_of_turn(encoder):
    rows = rows_of(encoder, pairs_of(encoder, MESSAGES))
    assert rows == rows_of(encoder, pairs_of(encoder, PROMPTED))
    end = encoder._tokenizer.eos_token
    assert [answer for _, answer in rows] == [f"Paris.{end}", f"Rome, I think.{end}"]
    assert rows[0][0] == rows[1][0]
    assert rows[0][0].endswith(("assistant\n", "<|end_header_id|>\n\n"))


def test_plain_text_has_no_template_and_one_end(encoder):
    end = encoder._tokenizer.eos_token
    pairs = pairs_of(encoder, TEXT)
    assert rows_of(encoder, pairs) == [("The capital is", f" Paris{end}"), ("The capital is", f" Rome.{end}")]
    assert pairs.margins.tolist() == [2.0]
    whole = {key: TEXT["prompt"] + TEXT[key] for key in ("chosen", "rejected")}
    assert rows_of(encoder, pairs_of(encoder, whole)) == rows_of(encoder, pairs)


def test_earlier_answers_of_a_conversation_belong_to_the_prompt(encoder):
    again = {"role": "user", "content": "And of Italy?"}
    row = {
        "chosen": [QUESTION, said("Paris."), again, said("Rome.")],
        "rejected": [QUESTION, said("Paris."), again, said("Paris.")],
    }
    rows = rows_of(encoder, pairs_of(encoder, row))
    assert [answer[:5] for _, answer in rows] == ["Rome.", "Paris"]
    assert "Paris." in rows[0][0]


def test_a_prompt_loses_as_many_tokens_in_both_rows_and_an_answer_none(encoder):
    whole, longest = pairs_of(encoder, PROMPTED), int(np.diff(pairs_of(encoder, PROMPTED).offsets).max())
    cut = pairs_of(encoder, PROMPTED, length=longest - 3)
    for row in range(2):
        before, after = (p.ids[p.offsets[row] : p.offsets[row + 1]].tolist() for p in (whole, cut))
        assert after == before[3:]
        assert cut.answers[row] == whole.answers[row] - 3
    assert cut.remarks == (
        f"1 pairs are longer than {longest - 3} tokens, and their prompts are cut at the left",
    )


def test_a_pair_whose_answer_does_not_fit_is_left_out_and_counted(encoder):
    room = int((np.diff(pairs_of(encoder, PROMPTED).offsets) - pairs_of(encoder, PROMPTED).answers).max())
    kept = pairs_of(encoder, PROMPTED, length=room + 1)  # one token before the first of the answer
    assert kept.answers.max() == 1
    both = pairs_of(encoder, PROMPTED, {**TEXT, "chosen": "x"}, length=room)
    assert len(both) == 1
    assert f"1 pairs are left out, as their answers do not fit into {room} tokens" in both.remarks
    same = pairs_of(encoder, TEXT, {**PROMPTED, "rejected": PROMPTED["chosen"]})
    assert same.remarks == ("1 pairs are left out, as both answers are the same",)
    with pytest.raises(DataError, match="must hold pairs whose answers fit into 3 tokens"):
        pairs_of(encoder, PROMPTED, length=3)


@over_table(
    ("row", "what"),
    [
        (
            {"chosen": [QUESTION]},
            "line 2: it must have the keys `chosen` and `rejected`, but its keys are: chosen",
        ),
        ({**TEXT, "margin": "much"}, "`margin` must be a number, but is 'much'"),
        ({**TEXT, "margin": True}, "`margin` must be a number"),
        ({**PROMPTED, "rejected": "Rome"}, "`rejected` must be a list of messages, but is a string"),
        (
            {**PROMPTED, "chosen": [QUESTION]},
            "it must hold two answers of the assistant, but one counts no token",
        ),
        (
            {**PROMPTED, "chosen": [said("Paris."), QUESTION, said("Paris.")]},
            "each of its answers must be one message of the assistant, but one is more",
        ),
        (b"[1]", "it must be an object"),
        (b"{", "it must be JSON, but is not"),
        ({**TEXT, "chosen": "<|eot_id|>"}, "its text names <|eot_id|>"),
    ],
)
def test_a_line_that_is_no_pair_is_named(row, what, tmp_path):
    encoder = ConversationEncoder(str(write_folder(tmp_path, byte_level(), CHATML, eos="<|im_end|>")))
    with pytest.raises(DataError) as caught:
        pairs_of(encoder, TEXT, row)
    assert what in str(caught.value)
    assert str(caught.value).endswith("; correct the line.")


def test_batches_have_both_answers_and_what_fills_a_step_counts_nothing():
    pairs = Pairs(
        np.array([5, 6, 7, 5, 8, 9, 9, 4, 3, 4, 2]),
        np.array([0, 3, 7, 9, 11]),
        np.array([1, 2, 1, 1]),
        np.array([0.0, 1.5], np.float32),
    )
    samples = PairSamples(pairs, 5, np.array([[-1.0, -2.0], [-3.0, -4.0]], np.float32))
    order = EpochOrder(samples, batch_size=3, epochs=2, seed=1)
    assert len(order) == 6
    batch = EpochOrder(samples, batch_size=3).batch([0, 1, 2])
    assert batch["tokens"].tolist() == [
        [[5, 6, 7, 0, 0], [5, 8, 9, 9, 0]],
        [[4, 3, 0, 0, 0], [4, 2, 0, 0, 0]],
        [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]],
    ]
    assert batch["lengths"].tolist() == [[3, 4], [2, 2], [1, 1]]
    assert batch["answers"].tolist() == [[1, 2], [1, 1], [1, 1]]
    assert batch["margins"].tolist() == [0.0, 1.5, 0.0]
    assert batch["reference"].tolist() == [[-1, -2], [-3, -4], [0, 0]]
    assert samples.padding_share == 1 - 11 / 20
    assert EpochOrder(samples, 3, 2, 1).description != EpochOrder(samples, 3, 2, 2).description
