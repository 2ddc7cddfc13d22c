"""The real step on fake tensors: allocation events, gradient map, costs, and the allocator's answer to them."""
