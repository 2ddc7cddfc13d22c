"""Preference pairs made from factual rows: the row's answer against the same answer with one thing in it made false."""
