"""Runs the real step on fake tensors: allocation events, gradient map, costs, and a replay of the allocator."""
