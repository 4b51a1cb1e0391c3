"""Writes the recipe's files: chats, pairs of answers, and prompts whose answers can be checked.

    python examples_3d/post_training/make_data.py --output out/post_training/data

The questions are sums of two digits, brackets to close, words to repeat, and small talk. In the chats half of
the answers are terse and half are wordy; the pairs prefer the terse ones; prompts come with the right answer.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

WORDS = str.split(
    "apple river stone cloud tiger music green seven winter candle garden silver bridge island "
    "rocket pepper window forest dragon velvet anchor basket copper desert engine falcon guitar "
    "harbor jungle kitten ladder meadow needle orange pillow quartz ribbon saddle temple valley "
    "walnut yellow zebra"
)
PAIRS = {"(": ")", "[": "]", "{": "}"}
TALK = (
    ("Hello!", "Hello. What can I do for you?"),
    ("Who are you?", "A small language model, trained on two cores."),
    ("What can you do?", "I add digits, close brackets and repeat words."),
    ("Thank you.", "You are welcome."),
    ("How large are you?", "About three million parameters."),
    ("Goodbye.", "Goodbye."),
)
Question = tuple[str, str, str]
"""The kind of a question, its text, and the answer."""


def sums() -> list[Question]:
    """All sums of two digits."""
    return [("sum", f"What is {a} + {b}?", str(a + b)) for a in range(10) for b in range(10)]


def brackets() -> list[Question]:
    """All rows of two or three brackets to close."""
    rows = [a + b for a in PAIRS for b in PAIRS]
    rows += [row + c for row in rows for c in PAIRS]
    return [("brackets", f"Close {row}", "".join(PAIRS[c] for c in reversed(row))) for row in rows]


def copies() -> list[Question]:
    """Words to repeat."""
    return [("copy", f"Repeat {word}", word) for word in WORDS]


def wordy(question: Question, rng: random.Random) -> str:
    """A long-winded form of the answer."""
    answer = question[2]
    forms = (f"The answer is {answer}, I think.", f"Let me see. It is {answer}.", f"I would say {answer}.")
    return rng.choice(forms)


def turn(text: str, answer: str) -> list[dict[str, str]]:
    """A question and its answer as messages."""
    return [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


def chats(questions: list[Question], count: int, rng: random.Random) -> Iterator[dict[str, object]]:
    """Conversations of one to three turns, half of whose answers are wordy."""
    for _ in range(count):
        messages = []
        for _ in range(rng.randint(1, 3)):
            if rng.random() < 0.1:
                messages += turn(*rng.choice(TALK))
                continue
            question = rng.choice(questions)
            terse = rng.random() < 0.5
            messages += turn(question[1], question[2] if terse else wordy(question, rng))
        yield {"messages": messages}


def preferences(questions: list[Question], count: int, rng: random.Random) -> Iterator[dict[str, object]]:
    """Pairs of a terse and a wordy answer."""
    for _ in range(count):
        question = rng.choice(questions)
        ask, good = turn(question[1], question[2])
        yield {"prompt": [ask], "chosen": [good], "rejected": turn("", wordy(question, rng))[1:]}


def prompts(questions: list[Question]) -> Iterator[dict[str, object]]:
    """Questions with the answer that a reward can check."""
    for kind, text, answer in questions:
        yield {"prompt": [{"role": "user", "content": text}], "answer": answer, "kind": kind}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of the files")
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    rng = random.Random(flags.seed)
    questions = [*sums(), *brackets(), *copies()]
    rng.shuffle(questions)
    cut = len(questions) * 9 // 10
    train, valid = questions[:cut], questions[cut:]
    files = {
        "chat_train": chats(train, 3000, rng),
        "chat_valid": chats(valid, 100, rng),
        "pairs_train": preferences(train, 600, rng),
        "pairs_valid": preferences(valid, 60, rng),
        "prompts": prompts([q for q in train if q[0] != "copy"]),
        "prompts_held_out": prompts([q for q in valid if q[0] != "copy"]),
    }
    flags.output.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        path = flags.output / f"{name}.jsonl"
        lines = [json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{path}: {len(lines)} rows")


if __name__ == "__main__":
    main()
