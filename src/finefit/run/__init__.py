"""The life cycle of a run directory: it is created, launched, run stage by stage, and resumed."""
