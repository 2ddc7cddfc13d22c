"""Mixtures of experts built from trained copies of one dense model, and gates that choose among them."""
