"""The commands `megazero checkpoint to-hf` and `megazero checkpoint from-hf`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from functools import partial

from megazero.commands.checkpoint.card import model_card
from megazero.commands.outputs import output_folder, output_run
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.errors import ConfigError, exit_status
from megazero.formats.hf.approximation import APPROXIMATIONS
from megazero.formats.hf.architectures import ARCHITECTURES
from megazero.formats.hf.convert import Imported, convert_from_hf, convert_to_hf
from megazero.formats.hf.writer import DTYPES, Exported

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3))
_KINDS = (
    "GPT2BPETokenizer",
    "HFTokenizer",
    "GPTSentencePieceTokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
)
_SHORT_DTYPES = (("fp32", "float32"), ("fp16", "float16"), ("bf16", "bfloat16"))


def to_hf_parser() -> argparse.ArgumentParser:
    """Build a parser of the flags of `to-hf`."""
    parser = argparse.ArgumentParser(
        prog="megazero checkpoint to-hf",
        description="Write a checkpoint as a folder that transformers loads.",
    )
    parser.add_argument("checkpoint", help="a checkpoint, or a run's folder, whose newest is taken")
    parser.add_argument("out", type=output_folder, help="folder to write; it must be new or empty")
    parser.add_argument(
        "--dtype",
        choices=[name for pair in _SHORT_DTYPES for name in pair],
        default="float32",
        help="type of the tensors (default float32, which loses nothing)",
    )
    parser.add_argument("--max-shard-size", default="5GB", help="most tensor bytes per file (default 5GB)")
    parser.add_argument(
        "--architecture",
        choices=[architecture.name for architecture in ARCHITECTURES],
        metavar="CLASS",
        help="the class in transformers, such as Phi3ForCausalLM; default: the one that the model was "
        "converted from, or else the first one that can express it",
    )
    parser.add_argument("--tokenizer-type", choices=_KINDS, help="use another tokenizer than the run's")
    parser.add_argument("--vocab-file", help="vocab.json for GPT2BPETokenizer, vocab.txt for BERT's")
    parser.add_argument("--merge-file", help="merges.txt for GPT2BPETokenizer")
    parser.add_argument("--tokenizer-model", help="file or folder for the other kinds")
    parser.add_argument("--no-tokenizer", action="store_true", help="write the model alone")
    parser.add_argument(
        "--license", help="the licence in the model card, such as apache-2.0; default: none is named"
    )
    for approximation in APPROXIMATIONS:
        parser.add_argument(
            approximation.flag, dest=approximation.flag, action="store_true", help=approximation.help
        )
    return parser


def from_hf_parser() -> argparse.ArgumentParser:
    """Build a parser of the flags of `from-hf`."""
    parser = argparse.ArgumentParser(
        prog="megazero checkpoint from-hf",
        description="Write the weights of a local Hugging Face model such as Llama or BERT as a checkpoint.",
    )
    parser.add_argument("hf", help="folder with config.json and model.safetensors or its shards")
    parser.add_argument("out", type=output_run, help="folder of the new run; it must hold no checkpoints")
    return parser


def main_to_hf(argv: Sequence[str]) -> int:
    """Run `to-hf`; returns the exit status."""
    flags = to_hf_parser().parse_args(argv)
    return exit_status(lambda: _to_hf(flags))


def main_from_hf(argv: Sequence[str]) -> int:
    """Run `from-hf`; returns the exit status."""
    flags = from_hf_parser().parse_args(argv)
    return exit_status(lambda: print(describe_import(convert_from_hf(flags.hf, flags.out))))


def parse_size(text: str) -> int:
    """Parse a size, such as ``5GB``, to bytes; units are those of transformers: KB, MB, GB, KiB, MiB, GiB.

    Raises:
        ConfigError: `text` is not a size.
    """
    match = re.fullmatch(r"([0-9]{1,15})\s*([A-Za-z]*)", text.strip())
    units = {name.lower(): size for name, size in _UNITS} | {"": 1, "b": 1}
    if match is None or match[2].lower() not in units or int(match[1]) == 0:
        raise ConfigError(f"`--max-shard-size` must be a size such as 5GB or 500MiB, but is {text!r}")
    return int(match[1]) * units[match[2].lower()]


def describe_export(exported: Exported, remark: str | None) -> str:
    """Describe the files that were written, and how to load them."""
    rows = [(name, f"{size:,}") for name, size in exported.files]
    width, digits = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"  {name:<{width}}  {size:>{digits}} bytes" for name, size in rows]
    if remark is not None:
        lines.append(f"no tokenizer was written: {remark}")
    loads = [f"  model = {exported.auto}.from_pretrained({str(exported.folder)!r})"]
    if remark is None:
        loads.append(f"  tokenizer = AutoTokenizer.from_pretrained({str(exported.folder)!r})")
    return "\n".join(
        [
            f"{exported.architecture}: {exported.tensors} tensors, {exported.parameters:,} parameters in "
            f"{exported.dtype}, written to {exported.folder}",
            *lines,
            "load it with transformers:",
            *loads,
        ]
    )


def describe_import(imported: Imported) -> str:
    """Describe the checkpoint that was written, and how to train it further."""
    description, folder = imported.description, imported.folder.parent
    further = f"train it further with `pretrain_gpt.py --load {folder} --finetune` and the flags of data"
    if description.model.num_classes is not None:
        further = (
            f"evaluate it or train it further with `finetune.py --pretrained-checkpoint {folder}` and the "
            "flags of task, data"
        )
    return "\n".join(
        [
            f"{description.architecture.name}: {imported.tensors} tensors, {imported.parameters:,} "
            f"parameters, written to {imported.folder}",
            *imported.remarks,
            *([f"classes: {', '.join(map(repr, description.labels))}"] if description.labels else []),
            f"tokenizer: {imported.tokenizer.tokenizer_type or 'none found; give the flags of one'}",
            f"{further}, length and optimizer",
        ]
    )


def _to_hf(flags: argparse.Namespace) -> None:
    asked = [approximation for approximation in APPROXIMATIONS if getattr(flags, approximation.flag)]
    exported, remark = convert_to_hf(
        flags.checkpoint,
        flags.out,
        dtype=DTYPES[dict(_SHORT_DTYPES).get(flags.dtype, flags.dtype)],
        max_shard_bytes=parse_size(flags.max_shard_size),
        tokenizer=_tokenizer(flags),
        architecture=flags.architecture,
        approximations=asked,
        card=partial(model_card, license=flags.license),
    )
    print(describe_export(exported, remark))
    for approximation in asked:
        print(approximation.remark)


def _tokenizer(flags: argparse.Namespace) -> TokenizerConfig | None:
    """The tokenizer that the flags ask for; None leaves the run's."""
    fields = {"vocab_file": flags.vocab_file, "merge_file": flags.merge_file}
    fields |= {"tokenizer_model": flags.tokenizer_model}
    files = [f"--{name.replace('_', '-')}" for name, value in fields.items() if value is not None]
    if flags.tokenizer_type is None and files:
        raise ConfigError(f"`--tokenizer-type` must be given with {' and '.join(files)}, but is not; add it")
    if flags.no_tokenizer:
        if flags.tokenizer_type is not None:
            raise ConfigError(
                "`--no-tokenizer` must be alone, but --tokenizer-type is given too; leave one out"
            )
        return TokenizerConfig()
    if flags.tokenizer_type is None:
        return None
    return TokenizerConfig(tokenizer_type=flags.tokenizer_type, **fields)
