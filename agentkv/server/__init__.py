"""The doors: an OpenAI-compatible ASGI app over any engine, and a way to call it without a socket."""
