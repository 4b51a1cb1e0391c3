"""profilers: what a run's steps spend time, memory and communication on, as tables, pictures and traces.

`build.py` chooses them by the settings; a run without any of them calls nothing here. Each is a
`account.profiler.Profiler`. See docs/account.md.
"""
