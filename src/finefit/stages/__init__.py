"""Stages without training: one module per kind, whose `make` fills a folder in a process of its own and returns a
summary."""
