"""The one exception that a user is meant to read."""

from __future__ import annotations


class UserError(Exception):
    """Bad input, in one sentence: what is wrong, where, and what to do. The command line prints it and exits with 2."""
