"""Language models as shapes, without allocation, up to those that no single machine holds."""

from dataclasses import dataclass
from typing import Literal

from ..llama import PRESETS, VOCABULARY, Llama, Shape

Cut = Literal["rows", "columns", "none"]
"""The dimension of a weight that tensor parallelism splits: rows (outputs), columns (inputs), or none."""

ROOT = "the rest"
"""The unit of all weights outside the layers."""

Found = list[tuple[str, Shape, Cut]]


@dataclass(frozen=True)
class Weight:
    """One parameter of a model."""

    name: str
    shape: Shape
    cut: Cut
    unit: str
    """The weights that FSDP gathers together: a layer, the experts of a layer, or the rest of the model."""

    @property
    def is_vocabulary(self) -> bool:
        """True if it is the embedding or the head, which the optimizers leave to AdamW."""
        return self.name in VOCABULARY

    @property
    def is_experts(self) -> bool:
        return len(self.shape) == 3


@dataclass(frozen=True, kw_only=True)
class GroupedAttention:
    """Attention in which groups of query heads share keys and values."""

    heads: int
    key_heads: int
    head: int
    """Width of a head."""

    def weights(self, hidden: int) -> Found:
        """Every parameter in the order of Hugging Face's `LlamaAttention`."""
        query, key = self.heads * self.head, self.key_heads * self.head
        return [
            ("q_proj.weight", (query, hidden), "rows"),
            ("k_proj.weight", (key, hidden), "rows"),
            ("v_proj.weight", (key, hidden), "rows"),
            ("o_proj.weight", (hidden, query), "columns"),
        ]


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Attention that makes queries, keys and values of two narrow vectors. A part of each head carries positions."""

    heads: int
    query_rank: int
    key_rank: int
    plain: int
    """Width of the part of a head's query and key that carries no position."""
    rotary: int
    """Width of the part that does; all heads share the key's."""
    value: int

    @property
    def key_heads(self) -> int:
        return self.heads

    def weights(self, hidden: int) -> Found:
        """Every parameter in the order of Hugging Face's `DeepseekV3Attention`."""
        return [
            ("q_a_proj.weight", (self.query_rank, hidden), "none"),
            ("q_a_layernorm.weight", (self.query_rank,), "none"),
            ("q_b_proj.weight", (self.heads * (self.plain + self.rotary), self.query_rank), "rows"),
            ("kv_a_proj_with_mqa.weight", (self.key_rank + self.rotary, hidden), "none"),
            ("kv_a_layernorm.weight", (self.key_rank,), "none"),
            ("kv_b_proj.weight", (self.heads * (self.plain + self.value), self.key_rank), "rows"),
            ("o_proj.weight", (hidden, self.heads * self.value), "columns"),
        ]


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The MLPs of a layer, of which a token passes through a few."""

    count: int
    active: int
    """Experts that a token is sent to."""
    shared: int
    """Experts that every token passes through besides."""
    intermediate: int
    """Width inside an expert."""
    dense_layers: int
    """Layers at the beginning that have an ordinary MLP instead."""

    def weights(self, hidden: int) -> Found:
        """Every parameter in the order of Hugging Face's `DeepseekV3MoE`, experts [E, out, in]."""
        return [
            ("experts.gate_up_proj", (self.count, 2 * self.intermediate, hidden), "rows"),
            ("experts.down_proj", (self.count, hidden, self.intermediate), "columns"),
            ("gate.weight", (self.count, hidden), "none"),
            *((f"shared_experts.{name}", shape, cut) for name, shape, cut in _mlp(hidden, self.shared_width)),
        ]

    @property
    def shared_width(self) -> int:
        return self.shared * self.intermediate


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """The sizes that decide every shape of a model, whose weights are not tied."""

    hidden: int
    intermediate: int
    """Width inside a dense MLP."""
    layers: int
    vocabulary: int
    attention: GroupedAttention | LatentAttention
    experts: Experts | None = None

    @classmethod
    def of(cls, llama: Llama) -> "Transformer":
        """A LLaMA of the first generation: as many heads of keys as of queries."""
        attention = GroupedAttention(heads=llama.heads, key_heads=llama.heads, head=llama.hidden // llama.heads)
        return cls(
            hidden=llama.hidden,
            intermediate=llama.intermediate,
            layers=llama.layers,
            vocabulary=llama.vocabulary,
            attention=attention,
        )

    def experts_of(self, layer: int) -> Experts | None:
        """The experts of a layer; None if it has one MLP."""
        return self.experts if self.experts is not None and layer >= self.experts.dense_layers else None

    def weights(self) -> list[Weight]:
        """Every parameter, named and ordered as in Hugging Face's `LlamaForCausalLM` and `DeepseekV3ForCausalLM`."""
        embedding, head = VOCABULARY
        words = (self.vocabulary, self.hidden)
        found = [Weight(embedding, words, "rows", ROOT)]
        for layer in range(self.layers):
            found += self._layer(layer)
        return [*found, Weight("model.norm.weight", (self.hidden,), "none", ROOT), Weight(head, words, "rows", ROOT)]

    def _layer(self, layer: int) -> list[Weight]:
        experts = self.experts_of(layer)
        mlp = _mlp(self.hidden, self.intermediate) if experts is None else experts.weights(self.hidden)
        norms: Found = [(f"{name}.weight", (self.hidden,), "none") for name in NORMS]
        named = [(f"self_attn.{name}", shape, cut) for name, shape, cut in self.attention.weights(self.hidden)]
        named += [*((f"mlp.{name}", shape, cut) for name, shape, cut in mlp), *norms]
        prefix = f"model.layers.{layer}"
        return [
            Weight(f"{prefix}.{name}", shape, cut, f"{prefix}.mlp.experts" if len(shape) == 3 else prefix)
            for name, shape, cut in named
        ]


def llama_parameters(llama: Llama) -> list[tuple[str, Shape]]:
    """Every parameter's name and shape, named and ordered as in Hugging Face's `LlamaForCausalLM`."""
    return [(weight.name, weight.shape) for weight in Transformer.of(llama).weights()]


NORMS = "input_layernorm", "post_attention_layernorm"


def _mlp(hidden: int, intermediate: int) -> Found:
    return [
        ("gate_proj.weight", (intermediate, hidden), "rows"),
        ("up_proj.weight", (intermediate, hidden), "rows"),
        ("down_proj.weight", (hidden, intermediate), "columns"),
    ]


def _llama_3(hidden: int, intermediate: int, heads: int, layers: int) -> Transformer:
    attention = GroupedAttention(heads=heads, key_heads=8, head=128)
    return Transformer(hidden=hidden, intermediate=intermediate, layers=layers, vocabulary=128_256, attention=attention)


# Llama 3: "The Llama 3 Herd of Models" (arXiv 2407.21783), table 3; 256 of its tokens are reserved, beyond the 128,000
# that the table has. DeepSeek-V3: its technical report (arXiv 2412.19437), section 4.2, without the layer that predicts
# a second token; the vocabulary is the released configuration's, the report saying 128K.
MODELS: dict[str, Transformer] = {
    **{name: Transformer.of(llama) for name, llama in PRESETS.items()},
    "8b": _llama_3(4096, 14336, 32, 32),
    "70b": _llama_3(8192, 28672, 64, 80),
    "405b": _llama_3(16384, 53248, 128, 126),
    "671b": Transformer(
        hidden=7168,
        intermediate=18432,
        layers=61,
        vocabulary=129_280,
        attention=LatentAttention(heads=128, query_rank=1536, key_rank=512, plain=128, rotary=64, value=128),
        experts=Experts(count=256, active=8, shared=1, intermediate=2048, dense_layers=3),
    ),
}
"""Every model that can be planned by name."""
