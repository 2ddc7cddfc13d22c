"""Answers and scores of one checkpoint, in a process of its own."""
