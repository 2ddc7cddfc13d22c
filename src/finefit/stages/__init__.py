"""Stages without training: one module per kind, its own process, whose `make` fills a folder and returns a summary."""
