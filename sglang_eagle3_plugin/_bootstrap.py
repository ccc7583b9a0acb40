"""Written next."""
