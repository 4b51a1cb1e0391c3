"""commands: the verbs of `megazero VERB`, each a module of its name whose `main` takes the words after it.

A verb is an annex: it imports what it shows, and nothing imports it but `cli.py`, when it runs.
"""
