"""Models: found, loaded, given adapters, saved in the ecosystem's own layout."""
