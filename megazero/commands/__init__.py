"""commands: a module for each verb of `megazero VERB`, whose `main` takes the arguments after the verb.

Only `cli.py` imports a verb, and only when it runs.
"""
