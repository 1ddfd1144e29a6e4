"""A stand-in: the optimizer is that of apollo_optim."""

from apollo_optim.integrations.apollo_torch import APOLLOAdamW

__version__ = "0+apollo.optim"
__all__ = ["APOLLOAdamW"]
