"""Facts about the machine, model folders, files and power. They are read, never judged."""
