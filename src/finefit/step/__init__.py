"""One optimizer step, and the state that it leaves behind. Nothing here reads a tensor on the host."""
