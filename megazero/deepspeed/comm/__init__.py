"""comm: `deepspeed.comm`, torch's collectives by DeepSpeed's names.

`collectives.py` has the calls, `world.py` asks about, opens and leaves groups, `adopt.py` finds a rank's
place in a job, `groups.py` and `mpu.py` show it to scripts, and `log.py` counts and times.
"""
