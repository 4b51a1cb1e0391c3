"""Memory over one step: `record.py` sees it, `timeline.py` is what was seen, `picture.py` draws it."""
