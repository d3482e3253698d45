"""A small delivery back end."""
