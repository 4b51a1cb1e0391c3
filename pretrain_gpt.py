"""Pretrain a GPT. `python pretrain_gpt.py --help` lists the flags; torchrun starts several ranks."""

import sys

from megazero.config.resolve import resolve_or_exit
from megazero.errors import exit_status
from megazero.train.folders import read_folder


def main() -> int:
    config = resolve_or_exit(sys.argv[1:], reader=read_folder)
    # After the flags are known to be good: torch takes seconds to import.
    from megazero.commands.pretrain import train

    return exit_status(lambda: train(config))


if __name__ == "__main__":
    sys.exit(main())
