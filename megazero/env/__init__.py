"""`megazero env`: what a machine has, what megazero would use of it, and what is in the way.

`gather` finds the facts, a value; problems and report are pure functions of it.
"""
