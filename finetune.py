"""Fine-tune a pretrained model on labelled texts. `python finetune.py --help` lists the flags."""

import sys

from megazero.config.resolve import resolve_or_exit
from megazero.errors import exit_status
from megazero.train.folders import read_folder


def main() -> int:
    config = resolve_or_exit(sys.argv[1:], "finetune.py", read_folder)
    # After the flags are known to be good: torch takes seconds to import.
    from megazero.train.finetuning.run import finetune

    return exit_status(lambda: finetune(config))


if __name__ == "__main__":
    sys.exit(main())
