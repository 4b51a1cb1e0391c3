"""Programs that people have, against a server of a small Llama: openai's, curl, the harness, MII's door."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
pytest.importorskip("transformers")

import httpx

from megazero.deepspeed import mii
from megazero.errors import ConfigError
from tests.serving.folders import llama_folder
from tests.serving.http.started import ROOT, Started, started

pytestmark = pytest.mark.slow
LINES = ("What is the capital of France?", "The capital is Rome.", "And of Italy? 🙂")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("llama") / "tiny")


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    with started(folder, tmp_path_factory.mktemp("log") / "log") as running:
        yield running


def complete(server: Started, **body) -> dict:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()


def test_openais_client(server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    settings = {"model": "tiny", "max_tokens": 12, "seed": 3}
    whole = client.completions.create(prompt=LINES[0], logprobs=2, **settings)
    parts = list(client.completions.create(prompt=LINES[0], stream=True, **settings))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert len(whole.choices[0].logprobs.token_logprobs) == whole.usage.completion_tokens
    messages = [{"role": "user", "content": LINES[0]}]
    chat = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=3, n=2, **settings)
    stream = client.chat.completions.create(
        messages=messages, stream=True, stream_options={"include_usage": True}, n=2, **settings
    )
    texts, usage = ["", ""], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in chat.choices]
    assert usage == chat.usage
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-9", prompt="a")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt=[1] * 300)
    assert (missing.value.code, long.value.code) == ("model_not_found", "context_length_exceeded")


def test_curl(server):
    body = json.dumps({"prompt": LINES[0], "max_tokens": 4, "stream": True, "temperature": 0})
    words = [
        "curl",
        "-sN",
        f"{server.url}/v1/completions",
        "-H",
        "Content-Type: application/json",
        "-d",
        body,
    ]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert said.startswith("data: {")
    assert said.endswith("data: [DONE]\n\n")


def test_scores_by_echo_are_those_of_transformers(server, folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = AutoTokenizer.from_pretrained(folder)(LINES[2])["input_ids"]
    answer = complete(server, prompt=[ids], max_tokens=0, echo=True, logprobs=1)["choices"][0]["logprobs"]
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [rows[i, token].item() for i, token in enumerate(ids[1:])]
    assert answer["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)


def harness_tasks(folder: Path, *, chat: bool) -> list[str]:
    """Write tasks that generate, and where there is no chat choose and score; return their names."""
    rows = [{"text": f"{line} ", "answer": "yes", "choices": [" yes", " no"]} for line in LINES]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
    common = {**data, "test_split": "test", "doc_to_text": "{{text}}", "metadata": {"version": 1}}
    until = {"until": ["\n", "."], "max_gen_toks": 5}
    tasks: dict[str, dict] = {
        "written": {
            "output_type": "generate_until",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": until,
        }
    }
    tasks["written"]["metric_list"] = [{"metric": "exact_match"}]
    if not chat:
        choices = {"doc_to_choice": "{{choices}}", "doc_to_target": 0}
        tasks["chosen"] = {"output_type": "multiple_choice", **choices}
        whole = {"doc_to_text": "", "doc_to_target": "{{text}}"}
        tasks["rolling"] = {"output_type": "loglikelihood_rolling", **whole}
        names = ("word_perplexity", "byte_perplexity", "bits_per_byte")
        tasks["rolling"]["metric_list"] = [{"metric": name} for name in names]
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **task}))
    return list(tasks)


def harness_run(folder: Path, output: Path, *words: str) -> tuple[dict, dict]:
    """The results of a line of the harness, and the answers that it got: task -> answer of each document."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder)}
    environment = {**os.environ, **offline, "PYTHONPATH": str(ROOT)}
    line = [*words, "--include_path", str(folder), "--output_path", str(output), "--log_samples"]
    done = subprocess.run(
        [sys.executable, "-m", *line], env=environment, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(next(output.rglob("results_*.json")).read_text())["results"]
    answers: dict[str, list] = {}
    for name in results:
        rows = map(json.loads, next(output.rglob(f"samples_{name}_*.jsonl")).read_text().splitlines())
        answers[name] = [row["filtered_resps"] for row in sorted(rows, key=lambda row: row["doc_id"])]
    return results, answers


@pytest.mark.parametrize("kind", ["local-completions", "local-chat-completions"])
def test_the_harness_as_a_client(server, folder, tmp_path, kind):
    """Its figures, and each of its answers, are those of `megazero lm-eval` on the same folder."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("tenacity")  # of its extra `api`
    chat = "chat" in kind
    tasks = ["--tasks", ",".join(harness_tasks(tmp_path, chat=chat)), *["--apply_chat_template"] * chat]
    path = "chat/completions" if chat else "completions"
    options = f"model=tiny,base_url={server.url}/v1/{path},num_concurrent=2,tokenizer={folder},max_length=200"
    asking = ["lm_eval", "--model", kind, "--model_args", options, "--batch_size", "1", *tasks]
    theirs, answered = harness_run(tmp_path, tmp_path / "asked", *asking)
    own = ["megazero.cli", "lm-eval", "--model_args", f"load={folder}", *tasks]
    ours, expected = harness_run(tmp_path, tmp_path / "own", *own)
    assert theirs.keys() == ours.keys()
    for name in ours:
        assert flat(answered[name]) == pytest.approx(flat(expected[name]), abs=1e-4), name
        figures = {key: value for key, value in ours[name].items() if isinstance(value, float)}
        assert {key: theirs[name][key] for key in figures} == pytest.approx(figures, rel=1e-5), name
    assert not chat or any(flat(expected["written"]))


def flat(answers: list) -> list[float]:
    """The numbers of answers, which the harness writes as texts, and the codes of the letters of others."""
    rest, row = list(answers), []
    while rest:
        one = rest.pop(0)
        if isinstance(one, list):
            rest = [*one, *rest]
            continue
        try:
            row.append(float({"True": 1, "False": 0}.get(str(one), one)))
        except ValueError:
            row += map(ord, one)
    return row


def test_miis_door(folder, tmp_path):
    pipe = mii.pipeline(str(folder))
    asked = {"max_new_tokens": 6, "do_sample": False}
    here = pipe(list(LINES), **asked)
    assert [row.generated_length for row in here] == [6] * 3
    with pytest.raises(ConfigError, match="`top_p` must be a number, from 1e-09 to 1, but is 3"):
        pipe("a", top_p=3)
    with pytest.raises(ConfigError, match="`quantization_mode` must be left out"):
        mii.pipeline(str(folder), quantization_mode="wf6af16")
    client = mii.serve(str(folder), deployment_name="tiny-test", port_number=50151)
    try:
        there = client.generate(list(LINES), **asked)
        assert there == here == mii.client("tiny-test").generate(list(LINES), **asked)
        heard = []
        client.generate(LINES[0], streaming_fn=heard.append, **asked)
        assert heard == [here[:1]]
    finally:
        client.terminate_server()


@pytest.mark.parametrize("flag", ["--tensor-model-parallel-size", "--pipeline-model-parallel-size"])
def test_two_ranks_answer_as_one_and_finish_after_sigterm(server, folder, tmp_path, flag):
    body = {"prompt": list(LINES), "max_tokens": 20, "seed": 5, "logprobs": 1}
    alone = complete(server, **body)["choices"]
    with started(folder, tmp_path / "log", flag, "2", ranks=2) as running:
        both = complete(running, **body)["choices"]
        assert [choice["text"] for choice in both] == [choice["text"] for choice in alone]
        for one, two in zip(both, alone, strict=True):
            assert one["logprobs"]["token_logprobs"] == pytest.approx(
                two["logprobs"]["token_logprobs"], abs=1e-4
            )
        long = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{running.url}/v1/completions", json=long, timeout=120) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        running.process.wait(60)


def test_a_killed_rank_ends_all_by_name(folder, tmp_path):
    with started(folder, tmp_path / "log", "--tensor-model-parallel-size", "2", ranks=2) as running:
        complete(running, prompt="a", max_tokens=2)
        began = time.monotonic()
        os.kill(running.ranks()[1], signal.SIGKILL)
        assert running.process.wait(60) != 0
        assert time.monotonic() - began < 40  # 15 s where nothing else runs
    assert "rank 1 is gone" in (tmp_path / "log").read_text()


def test_bad_starts_are_one_sentence(folder, tmp_path, server):
    port = server.url.rpartition(":")[2]
    for flags, said in (
        (
            [str(folder), "--port", port],
            f"must be a free address of this machine, but 127.0.0.1:{port} is not",
        ),
        ([str(tmp_path)], "must hold a checkpoint, but"),
        ([str(folder), "--port", "0", "--page-size", "17"], "`page` must be a multiple of 16, but is 17"),
        ([str(folder), "--port", "0", "--chat-template", "none"], "`--chat-template` must be text, but none"),
    ):
        words = [sys.executable, "-m", "megazero.cli", "serve", *flags]
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=200)
        assert done.returncode in (1, 2)
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        assert said in done.stderr
