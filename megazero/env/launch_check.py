"""The checks that a node makes before it waits for the other nodes: flags, files, GPUs, addresses.

    python -m megazero.env.launch_check --gpus-per-node 8 --nnodes 128 --node-rank 0 \\
        --master-addr HOST --master-port 6000 --script pretrain_gpt_175b.sh -- FLAGS

The launchers in `scripts/` run it first. It lists every problem of the launch and exits with status 2, or
says what the node will wait for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megazero.config.compat.blends import expanded
from megazero.config.compat.hub import is_name
from megazero.config.resolve import parse_config
from megazero.config.tree.config import Config
from megazero.data.blended import parse_blend
from megazero.data.splits import SPLIT_NAMES
from megazero.data.tokenizers.base import require_file
from megazero.errors import ConfigError, DataError, StorageError
from megazero.storage.urls import is_url
from megazero.train.folders import read_folder

_LOCAL = ("localhost", "127.0.0.1", "::1")
_TOKENIZER_FILES = (
    ("--vocab-file", "vocab_file"),
    ("--merge-file", "merge_file"),
    ("--tokenizer-model", "tokenizer_model"),
)


@dataclass(frozen=True)
class NodeLaunch:
    """One node's part of a launch.

    Attributes:
        script: the launcher's name, for messages.
        gpus_per_node: the ranks that each node starts.
        nodes: the number of nodes.
        node_rank: this node's number, from 0.
        address, port: the address and port at which node 0 listens.
    """

    script: str
    gpus_per_node: int
    nodes: int
    node_rank: int
    address: str
    port: int

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return self.gpus_per_node * self.nodes

    def needs(self) -> str:
        """The nodes and ranks of the job, as text."""
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{nodes} with {self.gpus_per_node} GPUs each, {self.world_size} ranks"

    def announcement(self) -> str:
        """A line about what the node does next, and what it will wait for."""
        if self.nodes == 1:
            return f"{self.script}: starting {self.gpus_per_node} ranks on this node"
        where = f"{self.address}:{self.port}"
        if self.node_rank:
            return f"{self.script}: node {self.node_rank} of {self.nodes} joins the job at {where}"
        return (
            f"{self.script}: node 0 of {self.nodes} waits at {where} for the {self.nodes - 1} others; run "
            f"the same command on each, with MASTER_ADDR={self.address} and NODE_RANK=1 to {self.nodes - 1}"
        )


def node_problems(launch: NodeLaunch, device: str, gpus: int | None) -> Iterator[str]:
    """The problems of this node.

    Args:
        launch: the node's part of the launch.
        device: the setting `--device`: auto, cpu or cuda.
        gpus: the number of GPUs of this node; None without torch.
    """
    if gpus is None:
        yield (
            f"Python must have torch, but {sys.executable} has none; activate the environment that `bash "
            "scripts/test.sh` makes."
        )
    elif device != "cpu" and gpus < launch.gpus_per_node:
        yield (
            f"this node must have {launch.gpus_per_node} GPUs, but torch sees {gpus}; set GPUS_PER_NODE, or "
            "add `--device cpu` to try a small model without them."
        )
    if launch.node_rank >= launch.nodes:
        yield (
            f"`NODE_RANK` must be below NNODES ({launch.nodes}), but is {launch.node_rank}; number the nodes "
            "from 0."
        )
    if launch.nodes > 1 and launch.address in _LOCAL:
        yield (
            f"`MASTER_ADDR` must be the address of node 0 when NNODES is {launch.nodes}, but is "
            f"{launch.address}; set it, or set NNODES=1 for this machine alone."
        )


def file_problems(config: Config) -> Iterator[str]:
    """The missing files of the data and the tokenizer, as messages."""
    data, tokenizer = config.data, config.tokenizer
    own = zip(SPLIT_NAMES, (data.train_data_path, data.valid_data_path, data.test_data_path), strict=True)
    for split, paths in (("train", data.data_path), *own):
        if paths:
            try:
                parse_blend(expanded(paths, split))
            except (DataError, StorageError) as error:
                yield str(error)
    for flag, field in _TOKENIZER_FILES:
        path = getattr(tokenizer, field)
        if path is not None and not is_url(path) and not (field == "tokenizer_model" and is_name(path)):
            try:
                require_file(path, flag, str(tokenizer.tokenizer_type), "a file")
            except (DataError, StorageError) as error:
                yield str(error)


def check_launch(launch: NodeLaunch, flags: Sequence[str], gpus: int | None) -> str:
    """Check a launch; return its announcement.

    Raises ConfigError if there are problems; all of them are listed.
    """
    config = parse_config(flags, world_size=launch.world_size, reader=read_folder, only_look=True).config
    problems = [*file_problems(config), *node_problems(launch, config.parallel.device, gpus)]
    if problems:
        raise ConfigError(problems)
    return launch.announcement()


def _gpus() -> int | None:
    try:
        import torch
    except ModuleNotFoundError:
        return None
    return torch.cuda.device_count()


def main(argv: Sequence[str] | None = None) -> int:
    """Check a launch; return the exit status, 2 if it is refused."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--script", default="launch", help="the launcher's name, for messages")
    parser.add_argument("--gpus-per-node", type=int, required=True)
    parser.add_argument("--nnodes", type=int, required=True)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--master-addr", default="localhost")
    parser.add_argument("--master-port", type=int, default=6000)
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    options, flags = parser.parse_args(words[:end]), words[end + 1 :]
    launch = NodeLaunch(
        options.script,
        options.gpus_per_node,
        options.nnodes,
        options.node_rank,
        options.master_addr,
        options.master_port,
    )
    try:
        print(check_launch(launch, flags, _gpus()), flush=True)
    except ConfigError as error:
        count = len(error.violations)
        reasons = f"{count} reason{'s' if count > 1 else ''}"
        print(
            f"{launch.script} needs {launch.needs()}; the launch is refused for {reasons}:", file=sys.stderr
        )
        print("\n".join(f"  {line}" for line in error.violations), file=sys.stderr)
        print(
            "On any machine, CHECK=1 before the command checks its flags, and PLAN=1 shows what it would do.",
            file=sys.stderr,
        )
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
