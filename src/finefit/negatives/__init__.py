"""Wrong answers for preference pairs: a row's answer against the same answer with one thing in it made false."""
