"""People judge answers without knowing which model gave them."""
