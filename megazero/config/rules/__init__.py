"""rules: the cross-field rules that a configuration must keep.

`rule.py` says what a rule is, `table.py` lists and checks all of them; `notes.py` says which settings are
accepted without effect; the other files hold the rules by subject.
"""
