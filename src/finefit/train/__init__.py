"""The training loop. A worker is a process whose only argument is a stage directory."""
