"""The step of a weight in plain PyTorch, alone or together with other ranks."""
