"""The data of a run: text from anywhere, tokenised once, read in an order that a seed decides.

Nothing is imported here: the processes that tokenise begin with `encode.py` alone, and so without torch.
"""
