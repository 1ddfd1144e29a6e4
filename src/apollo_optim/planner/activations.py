"""Bytes that a forward pass keeps for the backward pass, and what the two hold besides.

Counted tensor by tensor for Hugging Face's LLaMA and DeepSeek-V3 in eager mode with fused attention, in the manner of
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198): what the
gradient of every operation needs. A compiled model keeps less. A token takes, with `c` bytes to a number:

    RMSNorm of width h      h (4 + 2c) + 4      its input in float32, the normalised input, the output
    grouped attention       (2 heads + 2 key heads) head c + 4 heads      queries, keys, values, output; log-sums
    MLP of width i          4 i c               gate, its SiLU, up, their product
    experts, a active       a (2h + 4i) c       the input and output of each besides
    loss                    4 vocabulary + 8    log-probabilities in float32, and the label

Tokens are assumed to spread evenly over experts. Tensor parallelism splits everything but the inputs of attention, MLP
and head, which are gathered.
"""

from dataclasses import dataclass

from .models import Experts, GroupedAttention, LatentAttention, Transformer

FLOAT32 = 4
LOSSES = "plain", "chunked"
PITCH = 64
"""Rows of chunked logits begin at multiples of this many numbers."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The text that a GPU reads at once."""

    sequences: int
    sequence: int
    """Tokens of a sequence."""
    checkpointing: bool
    """True if layers keep only their inputs, and are computed again in the backward pass."""
    loss: str
    """plain: all logits at once; chunked: those of `chunk` tokens at a time, with their gradient."""
    chunk: int = 8192

    @property
    def tokens(self) -> int:
        return self.sequences * self.sequence

    @property
    def in_one_chunk(self) -> bool:
        """True if a chunked loss keeps the gradient of all logits for the backward pass."""
        return self.loss == "chunked" and self.tokens <= self.chunk


@dataclass(frozen=True)
class Activations:
    """Bytes of activations on a GPU."""

    model: Transformer
    batch: Batch
    compute: int
    """Bytes of a number in the layers' computations."""
    tensor: int = 1
    """Ranks of tensor parallelism."""

    @property
    def saved(self) -> int:
        """Bytes kept for the backward pass when the forward pass ends."""
        return self._layers + self.of_head

    @property
    def in_loss(self) -> int:
        """Bytes held besides during the loss, or during its gradient down to that of the head."""
        words, tokens, c = self.model.vocabulary // self.tensor, self.batch.tokens, self.compute
        if self.batch.loss == "plain":
            # Gradients of log-probabilities and logits; or, when those are free, of the narrowed logits and the head.
            return words * max(2 * FLOAT32 * tokens, c * (tokens + self.model.hidden))
        if self.batch.in_one_chunk:
            return words * c * self.model.hidden  # the gradient of the head
        # Logits of a chunk and their share of the head's gradient; or that gradient multiplied, and narrowed.
        return words * max(c * (self.batch.chunk + self.model.hidden), (FLOAT32 + c) * self.model.hidden)

    @property
    def in_layer(self) -> int:
        """Bytes held besides in a layer's backward: its activations, if recomputed, and their gradients."""
        recomputed = self._layer(self._widest) if self.batch.checkpointing else 0
        return recomputed + self._gradients(self._widest)

    @property
    def of_layer(self) -> int:
        """Bytes saved of one layer, and freed after its backward."""
        if self.batch.checkpointing:
            return self.batch.tokens * self.model.hidden * self.compute // self.tensor
        return self._layer(self._widest)

    @property
    def of_head(self) -> int:
        """Bytes saved behind the layers, and freed before the backward of any of them."""
        hidden, words, tokens = self.model.hidden, self.model.vocabulary // self.tensor, self.batch.tokens
        norm = tokens * self._norm(hidden)
        if self.batch.loss == "plain":
            return norm + tokens * (FLOAT32 * words + 8)
        if self.batch.in_one_chunk:
            return norm + tokens * -(-words // PITCH) * PITCH * self.compute
        return norm + words * hidden * FLOAT32  # the gradient of the norm's output in place of that output

    @property
    def _widest(self) -> int:
        return max(range(self.model.layers), key=self._layer)

    @property
    def _layers(self) -> int:
        if self.batch.checkpointing:
            return self.model.layers * self.of_layer
        return sum(self._layer(layer) for layer in range(self.model.layers))

    def _layer(self, layer: int) -> int:
        """All activations of a layer."""
        hidden, experts = self.model.hidden, self.model.experts_of(layer)
        mlp = self._mlp(self.model.intermediate) if experts is None else self._experts(experts)
        return self.batch.tokens * (2 * self._norm(hidden) + self._attention() + mlp)

    def _norm(self, width: int) -> int:
        return (width * (FLOAT32 + self.compute) + FLOAT32) // self.tensor + width * self.compute

    def _attention(self) -> int:
        c, attention = self.compute, self.model.attention
        if isinstance(attention, GroupedAttention):
            widths = 2 * (attention.heads + attention.key_heads) * attention.head
            return (widths * c + FLOAT32 * attention.heads) // self.tensor
        return self._latent(attention)

    def _latent(self, attention: LatentAttention) -> int:
        """Queries, keys and output, the tensor that keys and values are made in, and two narrow normed vectors."""
        query = attention.plain + attention.rotary
        head = (2 * query + attention.plain + 2 * attention.value) * self.compute + FLOAT32
        narrow = sum(
            width * (FLOAT32 + 2 * self.compute) + FLOAT32 for width in (attention.query_rank, attention.key_rank)
        )
        return attention.heads * head // self.tensor + narrow

    def _mlp(self, width: int) -> int:
        return 4 * width * self.compute // self.tensor

    def _experts(self, experts: Experts) -> int:
        """The experts that a token is sent to, those that it always passes, and the router's scores in float32."""
        hidden, c = self.model.hidden, self.compute
        routed = experts.active * (2 * hidden * c + self._mlp(experts.intermediate))
        router = (hidden * FLOAT32 if c < FLOAT32 else 0) + experts.count * (FLOAT32 + 1)
        return routed + self._mlp(experts.shared_width) + router

    def _gradients(self, layer: int) -> int:
        """Gradients in an MLP's backward: of the product (itself free by then), the SiLU, up, and the stream."""
        experts = self.model.experts_of(layer)
        width = self.model.intermediate if experts is None else experts.active * experts.intermediate
        rows = 1 if experts is None else experts.active
        inner = 2 * width // self.tensor
        return self.batch.tokens * self.compute * (inner + (1 + rows) * self.model.hidden)
