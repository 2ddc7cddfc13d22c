"""Local pages, served only to this machine unless a token is requested."""
