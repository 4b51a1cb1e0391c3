"""`megazero env`: what a machine has, what megazero would use of it, and its problems.

`gather` collects the facts into a value; problems and report are pure functions of this value.
"""
