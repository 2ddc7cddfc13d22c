"""People judge answers without knowing whose they are."""
