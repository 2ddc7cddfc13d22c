"""Several results -> differences with intervals, settings that differ named first."""
