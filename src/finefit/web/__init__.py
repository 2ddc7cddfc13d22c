"""Local pages: served to this machine alone unless a token is asked for."""
