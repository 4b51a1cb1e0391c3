"""Proof: the masks of `megazero data conversations` are the labels that TRL trains on, template by template.

`python proofs/trl_masks.py --trl PYTHON` needs a Python with TRL. For each chat template with
`{% generation %}` blocks, those of the tests and TRL's own for published models (`*_training.jinja`, read
from its installation), it makes a dataset by `megazero data conversations`, and lets TRL's `SFTTrainer`
prepare the same conversations with `assistant_only_loss=True`. Ids and labels must be equal, but for a row's
first token, which is nobody's label. Conversations that a template refuses are left out for both. A JSON line
for each template says how many conversations and labels there were, and how many differ; the exit status is 1
if any do.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megazero.data.conversations.answers import ConversationEncoder  # noqa: E402
from megazero.data.conversations.rows import BadRow, read_row  # noqa: E402
from megazero.data.indexed.reader import open_indexed  # noqa: E402
from megazero.data_tools.conversations import main as make_dataset  # noqa: E402
from tests.data.conversations.templates import STYLES  # noqa: E402
from tests.data.conversations.tokenizer import byte_level, word_marks, write_folder  # noqa: E402

_TEXTS = (
    ("What is the capital of France?", "Paris."),
    ("Hi", "The capital is Paris", "And of Italy? 🙂", " Rome.\n", "Thank you!", "née 🙂"),
    ("a", "b"),
    ("one\n\ntwo", "  three\n", "four", "five six seven"),
)
_SYSTEMS = (None, "Be brief, 早上好")

# In a process of its own, which has TRL: from a folder of folders, the labels of each.
_TRL = """import json, sys, torch, transformers, trl, datasets
from pathlib import Path
torch.set_num_threads(1)
for folder in map(Path, json.loads(sys.argv[1])):
    words = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    words.pad_token = "<pad>"
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(words), **sizes))
    settings = trl.SFTConfig(output_dir=str(folder / "trl"), assistant_only_loss=True, max_length=None,
                             use_cpu=True, report_to=[], bf16=False)
    rows = datasets.Dataset.from_list([json.loads(line) for line in open(folder / "rows.jsonl")])
    made = trl.SFTTrainer(model, settings, train_dataset=rows, processing_class=words).train_dataset
    labels = [[row["input_ids"], row["labels"]] for row in made]
    (folder / "labels.json").write_text(json.dumps(labels))
print(json.dumps({m.__name__: m.__version__ for m in (trl, transformers, datasets, torch)}))
"""
_TEMPLATES = """import pathlib, trl
for path in sorted(pathlib.Path(trl.__file__).parent.glob("chat_templates/*_training.jinja")): print(path)
"""


def conversations() -> list[dict[str, Any]]:
    """Chats of one, two and three rounds, without and with a system's text."""
    rows = []
    for system in _SYSTEMS:
        for texts in _TEXTS:
            turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
            rows.append([*([] if system is None else [{"role": "system", "content": system}]), *turns])
    return [{"messages": row} for row in rows]


def usable(folder: Path) -> list[dict[str, Any]]:
    """The conversations that the folder's template takes, and in which something counts."""
    encoder, rows = ConversationEncoder(str(folder)), []
    for row in conversations():
        try:
            if encoder.encode(read_row(json.dumps(row).encode()))[1].any():
                rows.append(row)
        except BadRow:
            continue
    return rows


def compare(folder: Path) -> tuple[int, int, int]:
    """The conversations, labels that count, and labels or ids that differ."""
    theirs = json.loads((folder / "labels.json").read_text())
    ours, differ, counted = open_indexed(folder / "made"), 0, 0
    mask = ours.mask
    assert mask is not None, "the dataset has a mask"
    start = 0
    for number, (ids, labels) in enumerate(theirs):
        own = ours.get(number).tolist()
        counts = mask[start : start + len(own)].tolist()
        start += len(own)
        expected = [int(label != -100) for label in labels]
        differ += (
            (own != ids) + sum(a != b for a, b in zip(counts[1:], expected[1:], strict=True)) + counts[0]
        )
        counted += sum(counts)
    return len(theirs), counted, differ + (len(ours) != len(theirs))


def run(python: str, scratch: Path) -> bool:
    """Prints a JSON line for each template; True if all agree."""
    told = subprocess.run([python, "-c", _TEMPLATES], check=True, capture_output=True, text=True)
    templates = {f"tests: {name}": text for name, text in STYLES.items()}
    templates |= {f"TRL: {Path(path).stem}": Path(path).read_text() for path in told.stdout.split()}
    folders: dict[str, Path] = {}
    for number, (name, template) in enumerate(templates.items()):
        words = name in ("tests: llama-2", "tests: mistral", "tests: gemma")
        folder = write_folder(scratch / str(number), word_marks() if words else byte_level(), template)
        rows = usable(folder)
        if not rows:
            print(
                json.dumps({"template": name, "conversations": 0, "why": "it refuses all, or has no marks"})
            )
            continue
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags = ["--input", str(folder / "rows.jsonl"), "--output-prefix", str(folder / "made")]
        with contextlib.redirect_stdout(io.StringIO()):
            assert make_dataset([*flags, "--tokenizer-model", str(folder)]) == 0, name
        folders[name] = folder
    given = json.dumps([str(folder) for folder in folders.values()])
    done = subprocess.run([python, "-c", _TRL, given], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    print(done.stdout.strip().splitlines()[-1])
    agree = True
    for name, folder in folders.items():
        count, counted, differ = compare(folder)
        agree &= not differ
        row = {"template": name, "conversations": count, "counted_tokens": counted, "different": differ}
        print(json.dumps(row), flush=True)
    return agree


def main() -> int:
    """Runs the proof; 0 if all labels agree."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trl", metavar="PYTHON", required=True, help="a Python with TRL")
    with tempfile.TemporaryDirectory() as scratch:
        return 0 if run(parser.parse_args().trl, Path(scratch)) else 1


if __name__ == "__main__":
    sys.exit(main())
