"""A folder with what a fine-tuning program asks for: a tiny model, its tokenizer, data, a DeepSpeed JSON."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from tests.deepspeed.programs.tiny import WORDS, llama
from tests.deepspeed.programs.trainer import config

TEMPLATE = "{% for m in messages %}w3 {{ m['content'] }} w2 {% endfor %}"


def prepare(folder: Path, stage: int) -> None:
    """Write ``model/``, ``data/`` and ``ds.json``."""
    words = {f"w{number}": number for number in range(WORDS)}
    pieces = Tokenizer(WordLevel(words, unk_token="w4"))
    pieces.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pieces, bos_token="w1", eos_token="w2", pad_token="w0", unk_token="w4"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    llama().save_pretrained(folder / "model")
    (folder / "data").mkdir()
    rows = [
        {"instruction": f"w{5 + i} w{6 + i} w{7 + i}", "input": "", "output": f"w{8 + i} w{9 + i} w{10 + i}"}
        for i in range(24)
    ]
    (folder / "data/rows.json").write_text(json.dumps(rows))
    (folder / "data/dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    (folder / "ds.json").write_text(json.dumps(config(stage, optimizer=False, scheduler=False)))
