"""Other programs that turn JSON lines into token files: each a script that needs its own packages alone.

`python FILE INPUT OUTPUT TOKENIZER_JSON WORKERS` encodes the texts under `text`, each with `<|endoftext|>`
behind it.
"""
