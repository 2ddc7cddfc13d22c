"""Wrong answers for preference pairs: a row's answer, and the same answer with one thing in it made false."""
