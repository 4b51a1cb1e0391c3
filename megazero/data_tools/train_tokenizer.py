"""Train a byte-level BPE or a WordPiece tokenizer on a jsonl corpus.

`megazero data train-tokenizer --input corpus.jsonl --output DIR` writes `tokenizer.json` (for
HFTokenizer) and `vocab.json` with `merges.txt` (for GPT2BPETokenizer); both give the same ids.
`<|endoftext|>` is id 0. `--type wordpiece` writes `tokenizer.json` and BERT's `vocab.txt` (for
BertWordPieceLowerCase, or BertWordPieceCase with `--cased`); `[PAD] [UNK] [CLS] [SEP] [MASK]` are ids 0 to 4.
The same corpus and flags give the same files.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megazero.data.build_report import ProgressLog
from megazero.data.files import whole_file
from megazero.data_tools import cli
from megazero.data_tools.preprocessing.chunks import cut
from megazero.data_tools.preprocessing.parsing import Problem, parse
from megazero.data_tools.wordpiece_training import train_wordpiece
from megazero.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
_LEAST_VOCAB = 257  # the 256 bytes and the end of text
_INTERVAL = 1.0  # seconds between two looks at the progress


def texts(paths: Sequence[str], key: str, limit: float | None) -> Iterator[str]:
    """Yield the texts of `key` in the first `limit` bytes of rows. Raises DataError naming a bad line."""
    used, path, line = 0, None, 1
    for chunk in cut(paths, keys=[key]):
        if limit is not None and used >= limit:
            return
        if chunk.path != path:
            path, line = chunk.path, 1
        if chunk.beyond is not None:
            raise _bad_line(f"{path}, {chunk.item}", line, chunk.too_long())
        rows = chunk.rows(chunk.read())
        if limit is not None:
            kept = 0
            while kept < len(rows) and used < limit:
                used += rows.size(kept)
                kept += 1
            rows = rows.first(kept)
        parsed = parse(rows, [key])
        if parsed.problems:
            raise _bad_line(f"{path}, {chunk.item}", line, parsed.problems[0])
        line += parsed.lines
        yield from parsed.columns[0].texts


def _bad_line(what: str, number: int, problem: Problem) -> DataError:
    return DataError(f"{what} {number + problem.line}: {problem.reason}: {problem.detail}; correct it.")


class TrainingProgress:
    """Prints the progress of training a tokenizer to stderr from time to time."""

    def __init__(self) -> None:
        self._read, self._whole = 0, False

    def counted(self, corpus: Iterator[str]) -> Iterator[str]:
        """Yield the texts, and count their characters."""
        for text in corpus:
            yield text
            self._read += len(text)
        self._whole = True

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Print progress while the block runs, on a thread, because the library gives no calls back."""
        done, progress = threading.Event(), ProgressLog(lambda line: print(line, file=sys.stderr), "training")

        def show() -> None:
            while not done.wait(_INTERVAL):
                read = f"{self._read / 1e6:,.1f} million characters read"
                progress.tell(f"{read}, merging" if self._whole else read)

        thread = threading.Thread(target=show, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def train_tokenizer(args: argparse.Namespace) -> None:
    """Train a tokenizer, and write its files atomically."""
    if args.cased and args.type != "wordpiece":
        raise DataError(
            "`--cased` must come with `--type wordpiece`, but does not; BPE always keeps the case."
        )
    limit = None if args.sample_mb is None else args.sample_mb * 1e6
    progress = TrainingProgress()
    corpus = progress.counted(texts(cli.expand_inputs(args.input), args.json_key, limit))
    with progress.shown():
        if args.type == "wordpiece":
            tokenizer, contents = train_wordpiece(corpus, args.vocab_size, cased=args.cased)
        else:
            tokenizer, contents = _train_bpe(corpus, args.vocab_size)
    if args.type == "wordpiece":
        kind = "BertWordPieceCase" if args.cased else "BertWordPieceLowerCase"
        note = f"for --tokenizer-type {kind} --vocab-file {Path(args.output) / 'vocab.txt'}"
    else:
        note = f"{END_OF_TEXT} is id {tokenizer.token_to_id(END_OF_TEXT)}"
    size = tokenizer.get_vocab_size()
    if size < args.vocab_size:
        raise DataError(
            f"`--vocab-size` must not exceed what the text yields, but is {args.vocab_size} where this "
            f"text yields {size}; give more text or a smaller vocabulary."
        )
    for name, content in contents.items():
        with whole_file(Path(args.output) / name) as file:
            file.write(content.encode())
    print(f"{args.output}: {size:,} tokens, {note}")


def _train_bpe(corpus: Iterator[str], size: int) -> tuple[Tokenizer, dict[str, str]]:
    """Train byte-level BPE; returns the tokenizer and the contents of its files by name."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if size < _LEAST_VOCAB:
        raise DataError(f"`--vocab-size` must be at least {_LEAST_VOCAB} for byte-level BPE, but is {size}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(corpus, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return tokenizer, {
        "vocab.json": json.dumps(vocab, ensure_ascii=False),
        "merges.txt": "\n".join(["#version: 0.2", *merges, ""]),
        "tokenizer.json": tokenizer.to_str(pretty=True),
    }


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the tool; returns 0 if the files were written."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.split("\n")[0])
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="jsonl files or globs")
    parser.add_argument("--output", required=True, metavar="DIR", help="directory for the files")
    parser.add_argument(
        "--type", choices=("bpe", "wordpiece"), default="bpe", help="kind of tokenizer (default: bpe)"
    )
    parser.add_argument(
        "--cased", action="store_true", help="WordPiece that keeps case and accents (default: lower case)"
    )
    parser.add_argument(
        "--vocab-size", type=cli.positive_int, default=8192, metavar="N", help="default: 8192"
    )
    parser.add_argument(
        "--json-key", default="text", metavar="KEY", help="key to take text from (default: text)"
    )
    parser.add_argument("--sample-mb", type=float, metavar="N", help="train on the first N MB of jsonl only")
    return cli.run(train_tokenizer, parser.parse_args(argv))
