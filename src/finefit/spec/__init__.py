"""What the user asks for: a spec, validated and frozen."""
