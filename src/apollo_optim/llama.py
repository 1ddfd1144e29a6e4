"""LLaMA models, by the sizes that decide their shapes. `planner/models.py` makes the shapes."""

from dataclasses import dataclass

Shape = tuple[int, ...]

VOCABULARY = "model.embed_tokens.weight", "lm_head.weight"
"""The two parameters that have a row for each entry of the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Llama:
    """The sizes of a LLaMA model, which has as many heads of keys and values as of queries, and no tied weights."""

    hidden: int
    """Width of the residual stream."""
    intermediate: int
    """Width inside an MLP."""
    heads: int
    """Attention heads of a layer; they share the width, so no shape depends on them."""
    layers: int
    vocabulary: int = 32000


# Appendix "Detailed Pre-Training Setting". Its 1B row reads 24 heads and 32 layers; 24 does not divide 2048, and only
# 32 heads in 24 layers make 1.3 billion parameters. 13B is named in the text alone: the shape is LLaMA's own.
MODELS: dict[str, Llama] = {
    "60m": Llama(hidden=512, intermediate=1376, heads=8, layers=8),
    "130m": Llama(hidden=768, intermediate=2048, heads=12, layers=12),
    "350m": Llama(hidden=1024, intermediate=2736, heads=16, layers=24),
    "1b": Llama(hidden=2048, intermediate=5461, heads=32, layers=24),
    "7b": Llama(hidden=4096, intermediate=11008, heads=32, layers=32),
    "13b": Llama(hidden=5120, intermediate=13824, heads=40, layers=40),
}

SMALL: dict[str, Llama] = {
    "1m": Llama(hidden=128, intermediate=344, heads=4, layers=4, vocabulary=1024),
    "9m": Llama(hidden=320, intermediate=864, heads=5, layers=5, vocabulary=4096),
}
"""Models for a CPU, with the paper's proportions. A large vocabulary would be most of such a model."""

PRESETS: dict[str, Llama] = SMALL | MODELS
"""All models that can be trained by name."""
