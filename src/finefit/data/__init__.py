"""Rows in, supervised tokens out: every row is used, or dropped with a reason."""
