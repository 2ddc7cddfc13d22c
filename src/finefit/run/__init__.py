"""The life of a run directory: created, launched, run stage by stage, resumed."""
