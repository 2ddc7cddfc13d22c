"""Checks before a run: one function each, yielding findings."""
