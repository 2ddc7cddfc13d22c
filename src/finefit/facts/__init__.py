"""What the world is: machine, model folders, files, power. Read, never judged."""
