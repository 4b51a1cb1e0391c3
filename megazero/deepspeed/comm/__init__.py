"""comm: `deepspeed.comm`, torch's collectives by DeepSpeed's names.

`collectives.py` has the calls, `world.py` asks about, opens and leaves groups, `log.py` counts and times.
"""
