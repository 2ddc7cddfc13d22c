"""Uncertainty of measured numbers."""
