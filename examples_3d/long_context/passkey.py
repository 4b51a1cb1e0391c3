"""Documents that hide a pass key in text, to train on, and prompts that ask for one.

After Mohtashami & Jaggi 2023. A document is one line: source code, `pass key=amber;` somewhere in it, more
source code, and `pass key=amber;` again. A prompt ends before the second word, and the model has to find it:
one of 64.

`words` writes a text to train a tokenizer on, `documents` and `prompts` write the two, and `judge` counts the
right answers in what `megazero generate` printed for the prompts. See run.sh.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megazero.data.files import whole_file
from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.errors import DataError, exit_status

_ASK = "pass key="
_SAID = 6  # about the tokens of ` pass key=amber;`
WORDS = (
    *("acorn", "amber", "apple", "badge", "basil", "beach", "birch", "bison"),
    *("brick", "camel", "candy", "cedar", "chalk", "cliff", "clover", "cobra"),
    *("coral", "crane", "daisy", "eagle", "ebony", "fern", "flute", "fox"),
    *("grape", "hazel", "heron", "honey", "ivory", "jade", "jasmin", "kiwi"),
    *("koala", "lemon", "lilac", "llama", "lotus", "lynx", "mango", "maple"),
    *("melon", "moose", "olive", "onion", "opal", "orchid", "otter", "owl"),
    *("panda", "pearl", "peony", "pine", "plum", "poppy", "quail", "raven"),
    *("robin", "ruby", "tiger", "tulip", "velvet", "walnut", "willow", "zebra"),
)
_TEST_SHARE = 0.1  # of the corpus, at its end, whose lines no training document has


class Filler:
    """Source code as one line, in pieces of known numbers of tokens.

    Args:
        corpus: jsonl file of documents.
        tokenizer: tokenizer.json.
        test: whether to take the part of the corpus that is for prompts.
    """

    def __init__(self, corpus: Path, tokenizer: Path, test: bool):
        self.tokenizer = build_tokenizer(TokenizerSpec("HFTokenizer", model=str(tokenizer)))
        documents = [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").split("\n")[:-1]]
        border = round(len(documents) * (1 - _TEST_SHARE))
        chosen = documents[border:] if test else documents[:border]
        lines = (" ".join(line.split()) for text in chosen for line in text.splitlines())
        said = re.compile("|".join(WORDS))  # the pass key is to be the only one of these words
        self._lines = [line for line in lines if line and said.search(line) is None]

    def text(self, tokens: int, rng: random.Random) -> str:
        """Lines that follow one another in the corpus, cut to about so many tokens."""
        number, parts, size = rng.randrange(len(self._lines)), [], 0
        while size < tokens:
            line = " " + self._lines[number % len(self._lines)]
            ids = self.tokenizer.encode(line)[: tokens - size]
            parts.append(self.tokenizer.decode(ids))
            number, size = number + 1, size + len(ids)
        return "".join(parts)


def make_words(args: argparse.Namespace) -> None:
    """Write a text that says every word often, so that a tokenizer trained on it too has a token for each."""
    with whole_file(args.output) as file:
        for word in WORDS:
            file.write(json.dumps({"text": f" {_ASK}{word};" * args.count}).encode() + b"\n")


def make_documents(args: argparse.Namespace) -> None:
    """Write documents that say their key again and again, at distances of all magnitudes.

    A model of random weights attends to all tokens alike. It learns to find the key where there are few, and
    then where there are more.
    """
    rng, filler = random.Random(args.seed), Filler(args.corpus, args.tokenizer, test=False)
    with whole_file(args.output) as file:
        for _ in range(args.count):
            key, parts, room = rng.choice(WORDS), [], args.tokens
            while len(parts) < args.times:
                gap = round(math.exp(rng.uniform(0, math.log(args.tokens))))
                if gap + _SAID > room:
                    break
                parts.append(f"{filler.text(gap, rng)} {_ASK}{key};")
                room -= gap + _SAID
            file.write(json.dumps({"text": "".join(parts)}).encode() + b"\n")


def make_prompts(args: argparse.Namespace) -> None:
    """Write `--count` prompts for each distance, and the keys beside them."""
    rng, filler = random.Random(args.seed), Filler(args.corpus, args.tokenizer, test=True)
    keys = []
    with whole_file(args.output) as file:
        for distance in args.distances:
            for _ in range(args.count):
                key, start = rng.choice(WORDS), filler.text(args.before, rng)
                between = filler.text(distance - _SAID, rng)
                file.write(f"{start} {_ASK}{key};{between} {_ASK}\n".encode())
                keys.append({"distance": distance, "key": key})
    args.output.with_suffix(".keys.json").write_text(json.dumps(keys))


def judge(args: argparse.Namespace) -> None:
    """Print, for each distance, how many of the keys that `megazero generate` printed are right."""
    keys = json.loads(args.prompts.with_suffix(".keys.json").read_text())
    answers = list(answers_in(args.answers.read_text(encoding="utf-8")))
    if len(answers) != len(keys):
        raise DataError(
            f"`--answers` must hold an answer for each of {len(keys)} prompts, but has {len(answers)}; give "
            "what `megazero generate` printed for these prompts."
        )
    print("distance  right   of")
    for distance in dict.fromkeys(key["distance"] for key in keys):
        right = [
            answer == k["key"] for k, answer in zip(keys, answers, strict=True) if k["distance"] == distance
        ]
        print(f"{distance:8,}  {sum(right):5}  {len(right):3}")


def answers_in(text: str) -> Iterator[str]:
    """The word after the last question of each prompt, as `megazero generate` prints them."""
    for part in re.split(r"^--- prompt \d+, sample \d+ ---\n", text, flags=re.MULTILINE)[1:]:
        asked = part.split("\n")[0].split(_ASK)
        # The prompt asks second; whatever the model goes on to ask itself comes after.
        yield re.match(r"\w*", asked[2])[0] if len(asked) > 2 else ""


def build_parser() -> argparse.ArgumentParser:
    """The commands."""
    parser = argparse.ArgumentParser(prog="passkey.py", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("words")
    command.set_defaults(run=make_words)
    command.add_argument("--output", type=Path, required=True)
    command.add_argument("--count", type=int, default=4000, help="how often each is said (4000)")
    for name, run in (("documents", make_documents), ("prompts", make_prompts)):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("--corpus", type=Path, required=True, help="jsonl file of source code")
        command.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
        command.add_argument("--output", type=Path, required=True)
        command.add_argument("--count", type=int, required=True, help="how many; prompts: of each distance")
        command.add_argument("--seed", type=int, default=1)
        if run is make_documents:
            command.add_argument(
                "--times", type=int, default=6, help="how often each says its key, at most (6)"
            )
            command.add_argument("--tokens", type=int, required=True, help="of a document, at most")
        else:
            command.add_argument(
                "--distances", type=int, nargs="+", required=True, help="from key to question, in tokens"
            )
            command.add_argument("--before", type=int, default=16, help="tokens before the key")
    command = commands.add_parser("judge")
    command.set_defaults(run=judge)
    command.add_argument("--prompts", type=Path, required=True, help="what `prompts` wrote")
    command.add_argument("--answers", type=Path, required=True, help="what `megazero generate` printed")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    args = build_parser().parse_args(argv)
    return exit_status(lambda: args.run(args))


if __name__ == "__main__":
    sys.exit(main())
