"""config: DeepSpeed's JSON as an engine takes it (`settings.py`), and as scripts look into it (`user.py`)."""
