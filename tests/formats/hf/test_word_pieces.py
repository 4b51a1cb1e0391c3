"""BERT's tokenizer for transformers: the same ids, special tokens in their roles, masks that are filled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megazero.commands.fill_mask import main as fill_mask
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.data.tokenizers.base import Tokenizer
from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.formats.hf.config_json import TokenIds
from megazero.formats.hf.convert import convert_from_hf, convert_to_hf
from megazero.formats.hf.tokenizer_files import tokenizer_files, tokenizer_settings
from tests.formats.hf.encoder_samples import BERTS
from tests.formats.hf.samples import random_weights
from tests.formats.hf.test_convert import save_as_trained

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "capital",
    "of",
    "is",
    "paris",
    "france",
    "##s",
    "x",
    "##x",
    ".",
    "na",
    "##ive",
    "é",
    "Paris",
    "e",
    "日",
    "(",
    ")",
]
TEXTS = (
    "The capital of France is Paris.",
    "na\u00efve \u00c9 e\u0301 \u65e5\u65e5(x)\t\u00a0paris",
    "[CLS] the [MASK] letters",
    "x" * 150 + " the",  # longer than what transformers' own class takes for a word
    "x" * 250 + " the",
)


@pytest.fixture
def vocabulary(tmp_path) -> str:
    path = tmp_path / "vocab.txt"
    path.write_bytes("\r\n".join(WORDS).encode())
    return str(path)


def section_for(kind: str, vocabulary: str, extra: int = 0) -> TokenizerConfig:
    return TokenizerConfig(tokenizer_type=kind, vocab_file=vocabulary, vocab_extra_ids=extra)


def built(section: TokenizerConfig) -> Tokenizer:
    spec = (section.tokenizer_type, section.vocab_file, section.merge_file, section.tokenizer_model)
    return build_tokenizer(TokenizerSpec(*spec))


def written(folder: Path, section: TokenizerConfig, model_type: str = "bert") -> Path:
    """Write a folder with the tokenizer's files and the ``config.json`` that AutoTokenizer needs."""
    folder.mkdir()
    for name, content in tokenizer_files(section, None, 512).files:
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@pytest.mark.parametrize("model_type", ["bert", "megatron-bert"])
@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_transformers_reads_it_and_gives_the_same_ids(kind, model_type, vocabulary, tmp_path):
    transformers = pytest.importorskip("transformers")
    section = section_for(kind, vocabulary)
    theirs = transformers.AutoTokenizer.from_pretrained(written(tmp_path / "out", section, model_type))
    ours = built(section)
    for text in TEXTS:
        plain = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert plain == ours.encode(text), text
    roles = {role: getattr(theirs, f"{role}_token_id") for role in ("unk", "cls", "sep", "mask", "pad")}
    assert roles == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    assert (len(theirs), theirs.model_max_length) == (len(WORDS), 512)
    pair = theirs("the [MASK]", "of x")
    assert pair["input_ids"] == [2, 5, 4, 3, 7, 12, 3]
    assert pair["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1]
    assert theirs(["the", "the of"], padding=True)["attention_mask"] == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert theirs.decode([5, 12, 11]) == "the xs"


@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_what_was_written_is_found_and_read_again(kind, vocabulary, tmp_path):
    section = section_for(kind, vocabulary)
    ours, folder = built(section), written(tmp_path / "out", section_for(kind, vocabulary, 3))
    assert (folder / "vocab.txt").read_text() == "\n".join(WORDS) + "\n"
    for size in (99, len(WORDS)):
        again = TokenizerConfig(**tokenizer_settings(folder, size))
        assert again.tokenizer_type == "HFTokenizer"
        tokenizer = built(again)
        assert [tokenizer.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]
        named = {role: ours.special_ids[role] for role in ("cls", "sep", "pad", "mask", "unk")}
        assert tokenizer.special_ids == named
        assert tokenizer.vocab_size == len(WORDS)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        (None, "BertWordPieceLowerCase"),
        ({"do_lower_case": True}, "BertWordPieceLowerCase"),
        ({"do_lower_case": False}, "BertWordPieceCase"),
    ],
)
def test_a_vocabulary_alone_is_bert_s(settings, kind, vocabulary, tmp_path):
    """megazero appends two ids, Megatron's [BOS] and [EOS], so the model must have rows for them."""
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert tokenizer_settings(tmp_path, len(WORDS) + 2) == {"tokenizer_type": kind, "vocab_file": vocabulary}
    assert tokenizer_settings(tmp_path, len(WORDS) + 1) == {}


def test_a_tokenizer_json_without_roles_has_bert_s(vocabulary, tmp_path):
    """Google's own folders have such settings: only the lower-case flag and the length."""
    folder = written(tmp_path / "out", section_for("BertWordPieceLowerCase", vocabulary))
    (folder / "special_tokens_map.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true, "model_max_length": 512}')
    tokenizer = built(TokenizerConfig(**tokenizer_settings(folder, 99)))
    assert tokenizer.special_ids == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    (folder / "tokenizer_config.json").write_text('{"mask_token": "x"}')
    assert built(TokenizerConfig(**tokenizer_settings(folder, 99))).special_ids["mask"] == 12


def test_only_the_padding_token_is_named_to_the_model(vocabulary):
    found = tokenizer_files(section_for("BertWordPieceLowerCase", vocabulary), None, 512)
    assert (found.tokens, found.remark) == (TokenIds(pad=0), None)


@pytest.mark.parametrize("name", ["megatron", "bert", "megatron-masked-lm", "bert-masked-lm"])
def test_the_fill_mask_pipeline_finds_what_ours_does(name, vocabulary, tmp_path, capsys):
    """The pipeline runs on an exported folder, megazero on a checkpoint made from that folder."""
    transformers = pytest.importorskip("transformers")
    model, section = BERTS[name], section_for("BertWordPieceLowerCase", vocabulary)
    weights = {key: tensor * 8 for key, tensor in random_weights(model).tensors.items()}
    run = save_as_trained(tmp_path / "run", model, section, weights=weights)
    convert_to_hf(run, tmp_path / "out")
    pipeline = transformers.pipeline("fill-mask", model=str(tmp_path / "out"), device="cpu")
    text = "The capital of [MASK] is Paris."
    convert_from_hf(tmp_path / "out", tmp_path / "again")
    assert fill_mask(["--load", str(tmp_path / "again"), "--top-k", "4", text]) == 0
    ours = [line.split("  ")[1:] for line in capsys.readouterr().out.splitlines()[1:]]
    # Rows beyond the words are no tokens; theirs decodes them to nothing.
    theirs = [
        (each["token_str"], each["score"]) for each in pipeline(text, top_k=101) if each["token"] < len(WORDS)
    ]
    assert [token for _, token in ours] == [token for token, _ in theirs[:4]]
    assert [float(value) for value, _ in ours] == pytest.approx([score for _, score in theirs[:4]], abs=6e-5)
