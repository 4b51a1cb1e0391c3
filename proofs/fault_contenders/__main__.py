"""What other trainers do in the same faults: DDP and FSDP2 of torch, DeepSpeed and megatron-core.

    python -m proofs.fault_contenders
    python -m proofs.fault_contenders --contenders ddp megatron-core --faults nan_once died

Two Gloo ranks train a small model for 30 steps, in the loop that each library's documentation shows, with
clipping, and one thing goes wrong on rank 1. Only what a library does by itself counts. Prints lines of JSON.
DeepSpeed and megatron-core take part where they are installed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing

from proofs.fault_contenders import deepspeed_
from proofs.fault_contenders.faults import FAULTS
from proofs.fault_contenders.run import installed, observe


def main() -> None:
    """Run the command."""
    known = installed()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contenders", nargs="+", choices=known, default=known)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    flags = parser.parse_args()
    if "deepspeed" in flags.contenders:
        # In a process of its own: those of the ranks are forked from this one.
        builder = multiprocessing.get_context("spawn").Process(target=deepspeed_.build)
        builder.start()
        builder.join()
    for name in flags.contenders:
        for fault in flags.faults:
            print(json.dumps(observe(name, fault)), flush=True)


if __name__ == "__main__":
    main()
