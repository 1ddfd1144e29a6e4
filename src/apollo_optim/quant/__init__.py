"""Numbers narrower than float32: how they are rounded."""
