"""Talking to a running server from outside: wait, status, debug control."""
