"""fault_contenders: what other trainers do by themselves in the faults that megazero guards against.

`faults.py` breaks things on one rank and says what a contender must offer; `plain.py`, `deepspeed_.py` and
`megatron.py` train with torch, DeepSpeed and megatron-core; `run.py` starts two ranks and sees what becomes
of them; `__main__.py` is the command.
"""
