"""Engines: whoever answers a model call. `base` is the protocol; `local` and `remote` are two of them."""
