"""One optimizer step, and the state that a step leaves behind. Nothing here reads a tensor on the host."""
