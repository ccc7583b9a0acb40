"""Hidden states on disk: formats, extraction, export, verify, compare, score."""
