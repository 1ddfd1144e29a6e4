"""A stand-in: the optimizers are those of apollo_optim."""

from apollo_optim.integrations.galore_torch import GaLoreAdafactor, GaLoreAdamW, GaLoreAdamW8bit

__version__ = "0+apollo.optim"
__all__ = ["GaLoreAdafactor", "GaLoreAdamW", "GaLoreAdamW8bit"]
