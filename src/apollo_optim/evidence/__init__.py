"""Runs side by side: what they left, pages that show it, and commands that make more of them."""
