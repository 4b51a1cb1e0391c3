"""What the tests of the preprocessor share."""

from __future__ import annotations

from megazero.data.indexed.reader import open_indexed
from megazero.data.tokenizers.build import TokenizerSpec
from megazero.data_tools.preprocessing import pipeline


def fox_rows(count: int) -> list[dict]:
    texts = [f"the quick fox {i} naïve 私は猫 <|endoftext|> " * (i % 7) for i in range(count)]
    return [{"text": text, "id": i} for i, text in enumerate(texts)]


def read_documents(prefix: str) -> list[list[list[int]]]:
    dataset = open_indexed(prefix, verify=True)
    count = dataset.document_index.size - 1
    return [[sequence.tolist() for sequence in dataset.document(k)] for k in range(count)]


def spec_of(flags: list[str]):
    values = dict(zip(flags[::2], flags[1::2], strict=True))
    return TokenizerSpec(
        values["--tokenizer-type"], values.get("--vocab-file"), values.get("--merge-file"), None, None
    )


def acting_after(chunks_before: int, act):
    """A stand-in for `cut` that does something in the middle of the run."""
    real = pipeline.cut

    def cut(paths, *_, **__):
        for chunk in real(paths, 200):
            if chunk.number == chunks_before:
                act()
            yield chunk

    return cut
