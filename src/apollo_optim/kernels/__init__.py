"""Triton kernels: device code only. The host side is in `fused`."""
