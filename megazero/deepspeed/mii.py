"""DeepSpeed-MII's `pipeline`, `serve` and `client`, over megazero's engine and its server.

``from megazero.deepspeed import mii`` stands for ``import mii``. A pipeline runs in this process, or in all
ranks of a launcher. A server is `megazero serve` in processes of its own, on this machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megazero.errors import CommunicationError, ConfigError, DataError
from megazero.inference.staged import StagedModel
from megazero.mpu.launch import Launch
from megazero.serving.engine import Engine, complete

Prompts = str | Sequence[str]
_PATIENCE = 600.0


class Response(SimpleNamespace):
    """A text: `generated_text`, `prompt_length`, `generated_length` in tokens, `finish_reason`."""

    def __str__(self) -> str:
        return str(self.generated_text)


class Pipeline:
    """A model in this process; `mii.pipeline` makes it. Every rank calls it with the same prompts."""

    def __init__(self, folder: str, tensor_parallel: int | None, all_ranks: bool):
        from megazero.serving.http.service import make_service
        from megazero.train.resume.trained import AxisSizes, load_for_inference

        loaded = load_for_inference(folder, Launch.from_environment(), AxisSizes(tensor_parallel))
        parts: Any = dict(loaded.chunks)
        self._model: StagedModel[Any] = StagedModel(parts, loaded.stage_of, loaded.context.pp, loaded.sharers)
        self._service = make_service(folder, loaded.tokenizer, Engine(self._model), None)
        self._answers = all_ranks or loaded.context.rank == 0

    def __call__(self, prompts: Prompts, **keywords: object) -> list[Response]:
        """Continue prompts, by MII's keywords and defaults. Raises ConfigError if one of them is wrong."""
        from megazero.serving.http.answering import whole_text
        from megazero.serving.http.fields import Refusal
        from megazero.serving.http.mii import mii_answer, mii_orders

        given = [prompts] if isinstance(prompts, str) else list(prompts)
        try:
            orders, values = mii_orders(self._service, {"prompts": given, **keywords})
        except Refusal as refusal:
            raise ConfigError(refusal.message) from refusal
        answers = complete(self._model, [order.wanted for order in orders])
        done = [whole_text(self._service, *pair) for pair in zip(orders, answers, strict=True)]
        rows = mii_answer([order.prompt for order in orders], done, values["return_full_text"])
        return [Response(**row) for row in rows] if self._answers else []


class Client:
    """Speaks to a server; `mii.serve` and `mii.client` make it."""

    def __init__(self, name: str, port: int, process: subprocess.Popen[bytes] | None = None):
        self._name, self._port, self._process = name, port, process

    def generate(
        self,
        prompts: Prompts,
        streaming_fn: Callable[[list[Response]], None] | None = None,
        **keywords: object,
    ) -> list[Response]:
        """Continue prompts by MII's keywords; `streaming_fn` is called once, with the whole texts."""
        given = [prompts] if isinstance(prompts, str) else list(prompts)
        rows = self.ask(f"/mii/{self._name}", {"prompts": given, **keywords})
        responses = [Response(**row) for row in rows]
        if streaming_fn is not None:
            streaming_fn(responses)
        return responses

    __call__ = generate

    def terminate_server(self) -> None:
        """End the server once it has answered what it has begun."""
        self.ask("/terminate", {})
        _record(self._name).unlink(missing_ok=True)
        if self._process is not None:
            self._process.wait(_PATIENCE)

    def ask(self, path: str, body: object = None) -> Any:
        """Send JSON and return what comes back.

        Raises:
            ConfigError: the server refuses the request.
            CommunicationError: it does not answer.
        """
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", content)
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise ConfigError(json.load(error)["error"]["message"]) from error
        except OSError as error:
            raise CommunicationError(
                f"`{self._name}` must answer at port {self._port}, but: {error}"
            ) from error


def pipeline(
    model_name_or_path: str, model_config: object = None, all_rank_output: bool = False, **keywords: Any
) -> Pipeline:
    """Load a model into this process. Raises ConfigError for keywords other than `tensor_parallel`."""
    parallel = keywords.pop("tensor_parallel", None)
    _refuse(model_config=model_config, **keywords)
    return Pipeline(model_name_or_path, parallel, all_rank_output)


def serve(
    model_name_or_path: str,
    model_config: object = None,
    *,
    deployment_name: str | None = None,
    tensor_parallel: int = 1,
    replica_num: int = 1,
    enable_restful_api: bool = False,
    restful_api_port: int = 51080,
    port_number: int = 50050,
    **keywords: Any,
) -> Client:
    """Start a server and wait until it answers: at `restful_api_port` if that is enabled, else `port_number`.

    Raises:
        ConfigError: there are several replicas, or keywords that the server lacks.
        CommunicationError: the server has ended, or does not answer.
    """
    _refuse(model_config=model_config, replica_num=None if replica_num == 1 else replica_num, **keywords)
    name = deployment_name or f"{Path(model_name_or_path).name}-mii-deployment"
    port = restful_api_port if enable_restful_api else port_number
    ranks = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(tensor_parallel), "-m"]
    words = [sys.executable, "-m", *(ranks if tensor_parallel > 1 else []), "megazero.cli", "serve"]
    words += [model_name_or_path, "--port", str(port), "--mii-deployment", name]
    words += ["--tensor-model-parallel-size", str(tensor_parallel)]
    process = subprocess.Popen(words)
    client, end = Client(name, port, process), time.monotonic() + _PATIENCE
    while process.poll() is None and time.monotonic() < end:
        try:
            client.ask("/health")
        except (CommunicationError, ConfigError):
            time.sleep(0.2)
            continue
        _record(name).write_text(str(port))
        return client
    process.terminate()
    raise CommunicationError(f"`{name}` must answer at port {port}, but has ended or is silent")


def client(model_or_deployment_name: str) -> Client:
    """Speak to a server that `serve` has started on this machine. Raises DataError if there is none."""
    for name in (model_or_deployment_name, f"{Path(model_or_deployment_name).name}-mii-deployment"):
        if _record(name).is_file():
            return Client(name, int(_record(name).read_text()))
    raise DataError(
        f"`{model_or_deployment_name}` must be a deployment that runs, but is none; see mii.serve"
    )


def _record(name: str) -> Path:
    """The file that says at which port a deployment answers, which this user alone can write."""
    folder = Path(tempfile.gettempdir()) / f"megazero-mii-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / name.replace(os.sep, "_")


def _refuse(**keywords: object) -> None:
    given = [name for name, value in keywords.items() if value is not None]
    if given:
        raise ConfigError(
            f"`{given[0]}` must be left out: megazero's pipeline and server have no such setting"
        )
