"""The run directory: its paths, every record in it, and writing that a kill cannot tear."""
