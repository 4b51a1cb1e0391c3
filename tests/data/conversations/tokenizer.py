"""Small tokenizers with the special tokens of all templates here, in a folder as transformers reads it."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|end|>", "<pad>"),
)
TEXT = (
    "system user assistant model tool\nWhat is the capital of France? The capital is Paris, I think.\n"
    "And of Italy? Rome.  Thank you!  [INST] [/INST] <<SYS>>\n\n<</SYS>> Be of help. Tools: <call> </call>\n"
)


def byte_level() -> tokenizers.Tokenizer:
    """A byte-level BPE, as of GPT-2, Llama 3 and Qwen."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=[*SPECIAL], initial_alphabet=alphabet)
    backend.train_from_iterator([TEXT] * 3, trainer)
    return backend


def word_marks() -> tokenizers.Tokenizer:
    """A BPE of marked words that falls back to bytes, and puts <s> before a text, as of Llama 2."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", *SPECIAL, *fallback])
    backend.train_from_iterator([TEXT] * 3, trainer)
    begin = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", begin)])
    definition = json.loads(backend.to_str())
    definition["added_tokens"] = [
        token for token in definition["added_tokens"] if token["content"] not in fallback
    ]
    return tokenizers.Tokenizer.from_str(json.dumps(definition))


def write_folder(
    folder: Path, backend: tokenizers.Tokenizer, template: str | None = None, eos: str | None = "</s>"
) -> Path:
    """The files of a tokenizer, with a chat template in its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": eos}
    config |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
