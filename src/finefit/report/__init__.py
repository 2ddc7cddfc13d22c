"""Records -> tables and views. No decisions."""
