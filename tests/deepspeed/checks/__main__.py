"""``python -m tests.deepspeed.checks AREA RANKS FOLDER [--real]``: the area's checks for so many ranks.

A rank of several is started by a launcher. The first rank writes ``FOLDER/AREA-RANKS.json``: check -> value,
or what it raised. `--real` takes the `deepspeed` that is installed.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
import traceback
from pathlib import Path

from tests.deepspeed.checks import checks_of


def main() -> None:
    area, ranks, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    import torch

    torch.set_num_threads(1)
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_SIZE": ranks}.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    if "--real" in sys.argv:
        import deepspeed
    else:
        from megazero.deepspeed.surface import install

        deepspeed = install()
    first = os.environ["RANK"] == "0"
    values = {}
    checks = checks_of(importlib.import_module(f"tests.deepspeed.checks.{area}"))
    gc.freeze()  # a collection after each check looks at what the check left, not at all of torch
    for name, each in checks.items():
        if each.ranks != ranks:
            continue
        scratch = folder / f"{area}.{name}"
        scratch.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(1234)
        try:
            values[name] = {"value": each.run(deepspeed, scratch)}
        except BaseException:
            values[name] = {"error": traceback.format_exc()}
        gc.collect()
        if first:  # after each: what follows may end the process
            (folder / f"{area}-{ranks}.json").write_text(json.dumps(values))


if __name__ == "__main__":
    main()
