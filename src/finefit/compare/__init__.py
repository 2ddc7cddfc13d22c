"""Compares several results: differences with intervals, and first the settings that differ."""
