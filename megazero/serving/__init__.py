"""serving: many requests at once, answered by one model.

`page_buffers.py` has the keys and values of all requests in pages, and attention over them.
"""
