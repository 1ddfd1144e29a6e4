"""The arithmetic of a step on real tensors, and the one place that picks how it is done."""
