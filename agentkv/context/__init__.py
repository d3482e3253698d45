"""What the model reads: a prompt whose beginning stays the same, counted and kept short."""
