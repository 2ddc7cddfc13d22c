"""Plans a run: resolved values, each with its source, and forecasts of memory and time."""
