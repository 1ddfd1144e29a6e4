"""The step as a handful of Triton launches for all weights together. Importing this imports triton."""
