"""The uncertainty of measured numbers."""
