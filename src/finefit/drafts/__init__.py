"""Specs that are written for the user: from a config of another tool, or from a data file."""
