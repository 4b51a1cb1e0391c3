"""Models are loaded for inference from folders of Hugging Face and Megatron as from their conversions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.errors import CheckpointError, ConfigError
from megazero.formats.megatron.reader import ImportOptions, MegatronReader
from megazero.inference.staged import StagedModel
from megazero.models.batch import Batch
from megazero.mpu.context import thread_context
from megazero.mpu.launch import Launch, grid_of
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.resume.trained import AxisSizes, load_for_inference
from tests.formats.hf.samples import LLAMA, VOCAB, config_for, logits_of, their_tensors, write_folder
from tests.formats.megatron import samples as megatron
from tests.tables import over_table

BYTES = TokenizerConfig(tokenizer_type="ByteLevelTokenizer")
TOKENS = torch.arange(12).view(1, 12)


def write_tokenizer(folder: Path) -> TokenizerConfig:
    """Write a tokenizer.json of a few words."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"<unk>": 0, "</s>": 1, "a": 2, "b": 3}
    model = tokenizers.models.WordLevel(vocab, unk_token="<unk>")
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    return TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(folder))


def write_megatron(folder: Path) -> None:
    """Save Megatron's model of two slices and stages."""
    weights = megatron.random_weights(megatron.LLAMA)
    megatron.save_megatron(folder, megatron.LLAMA, weights, megatron.Layout(tp=2, pp=2))
    (folder / "latest_checkpointed_iteration.txt").write_text("100")


def logits(folder: Path, monkeypatch, sizes: AxisSizes, options: ImportOptions, world_size: int = 1):
    """The logits [b, s, v] of every rank."""
    world = ThreadWorld(world_size)

    def join(parallel, launch):
        return thread_context(world, grid_of(parallel, launch.world_size), launch.rank)

    monkeypatch.setattr("megazero.train.resume.trained.join", join)

    def work(rank: int):
        loaded = load_for_inference(str(folder), Launch(rank, world_size), sizes, options=options)
        model = StagedModel(loaded.chunks, loaded.stage_of, loaded.context.pp)

        def all_logits(head, hidden):
            return model.unsliced(head(hidden)).transpose(0, 1)

        with torch.inference_mode():
            return loaded, model.run(Batch(TOKENS), all_logits, (1, 12, model.vocab_size))

    return world.run(work)


def test_a_hugging_face_folder_is_what_transformers_reads_on_any_layout(tmp_path, monkeypatch):
    write_folder(tmp_path, config_for(LLAMA), their_tensors(LLAMA))
    write_tokenizer(tmp_path)
    ((loaded, alone),) = logits(tmp_path, monkeypatch, AxisSizes(), ImportOptions())
    assert (alone.shape, loaded.tokenizer.eod) == ((1, 12, VOCAB), 1)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(alone, theirs(TOKENS).logits, rtol=0, atol=1e-5)
    for sizes, world in ((AxisSizes(2), 2), (AxisSizes(1, 2), 2), (AxisSizes(2, 2, replicas=True), 8)):
        for _, sliced in logits(tmp_path, monkeypatch, sizes, ImportOptions(), world):
            torch.testing.assert_close(sliced, alone, rtol=0, atol=1e-5)


def test_megatrons_slices_are_joined_without_a_conversion(tmp_path, monkeypatch):
    write_megatron(tmp_path)
    options = ImportOptions(True, megatron.VOCAB, tokenizer=write_tokenizer(tmp_path))
    ((loaded, alone),) = logits(tmp_path, monkeypatch, AxisSizes(), options)
    assert (alone.shape[-1], loaded.iteration) == (megatron.VOCAB, 100)
    with MegatronReader(tmp_path, options) as reader:
        expected = logits_of(reader, reader.model, TOKENS)
    torch.testing.assert_close(alone, expected, rtol=1e-5, atol=1e-5)
    for _, sliced in logits(tmp_path, monkeypatch, AxisSizes(2, 2), options, 4):
        torch.testing.assert_close(sliced, alone, rtol=1e-4, atol=1e-4)


@over_table(
    ("folder", "options", "launch", "message"),
    [
        ("hf", ImportOptions(), Launch(), "was trained without one"),
        ("hf", ImportOptions(tokenizer=BYTES), Launch(0, 3), "`world size` must be 1 for one model of these"),
        ("megatron", ImportOptions(), Launch(), "`--trust-pickle` must be given"),
        (
            "bert",
            ImportOptions(tokenizer=BYTES),
            Launch(),
            "of the family bert; use `megazero fill-",
        ),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_a_sentence(folder, options, launch, message, tmp_path):
    if folder == "hf":
        write_folder(tmp_path / "hf", config_for(LLAMA), their_tensors(LLAMA))
    if folder == "megatron":
        write_megatron(tmp_path / folder)
    if folder == "bert":
        transformers = pytest.importorskip("transformers")
        sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 40}
        config = transformers.BertConfig(**sizes, intermediate_size=16)
        transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    with pytest.raises((ConfigError, CheckpointError), match=message.replace("(", "[(]")):
        load_for_inference(str(tmp_path / folder), launch, options=options)
