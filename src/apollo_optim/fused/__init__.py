"""The fused step on the host: which weights share a launch, the tables their kernels read, and the launches."""
