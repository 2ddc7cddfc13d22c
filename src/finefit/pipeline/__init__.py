"""Stages as processes: prepared once, launched, resumed, evaluated."""
