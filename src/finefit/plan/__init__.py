"""Resolved values, each with its source."""
