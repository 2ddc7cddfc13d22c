"""Stages without training: one module per kind, run in its own process, whose `make` fills a folder and returns a
summary."""
