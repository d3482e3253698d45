"""The nouns: frozen values that every room may pass on. No logic beyond arithmetic on themselves."""
