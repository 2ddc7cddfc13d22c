"""Models are found, loaded, given adapters, and saved in the ecosystem's own layout."""
