"""User models: one Python file of the user behind the same protocol as transformers models."""
