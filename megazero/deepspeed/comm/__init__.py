"""comm: `deepspeed.comm`, torch's collectives by DeepSpeed's names.

`collectives.py` has the collectives and messages, `world.py` opens, queries and leaves groups, `adopt.py`
finds a rank's place in a job, `groups.py` and `mpu.py` are its getters, and `log.py` counts and times calls.
"""
