"""The run directory: its paths, every record in it, and writes that a kill cannot leave half done."""
