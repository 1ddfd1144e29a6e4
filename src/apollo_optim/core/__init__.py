"""The mathematics of the family, once, on plain tensors. Imports torch and nothing else."""
