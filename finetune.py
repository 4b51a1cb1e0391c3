"""Fine-tune a pretrained model. `python finetune.py --help` lists the flags."""

import sys

from megazero.commands.finetune import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "finetune.py"))
