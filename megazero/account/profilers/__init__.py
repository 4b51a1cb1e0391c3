"""profilers: show where the time, memory and communication of steps go, as tables, pictures and traces.

Each is an `account.profiler.Profiler`. `build.py` makes those that the settings ask for; a run without any
calls nothing here. See docs/account.md.
"""
