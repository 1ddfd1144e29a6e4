"""A member of the family is a row of data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Projection = Literal["identity", "gaussian", "svd", "svd_lowrank", "power"]
Granularity = Literal["element", "channel", "tensor", "spectral"]
SecondMoment = Literal["elementwise", "factored", "rowwise"]

PROJECTIONS: tuple[str, ...] = get_args(Projection)
GRANULARITIES: tuple[str, ...] = get_args(Granularity)
SECOND_MOMENTS: tuple[str, ...] = get_args(SecondMoment)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The rule by which a gradient becomes an update."""

    projection: Projection
    """The space of the moments: the whole space, a random subspace made from a seed, the leading singular vectors of a
    gradient, or, of a spectral step, those of the momentum itself, which one power iteration a step follows."""
    granularity: Granularity
    """The elements that share one gain: none (the normalised step itself is the update), a channel, the whole tensor,
    or all along one singular direction (each direction then takes a step of the same length)."""
    residual: bool = False
    """True if what the projection leaves out is added back, scaled per channel (Fira)."""
    second_moment: SecondMoment = "elementwise"
    """Adam's, beside the first moment; Adafactor's row and column means of the full gradient (Flora, and weights that
    are not projected); or, of weights that are not projected, one number per row."""
    growth_limit: float | None = None
    """The largest growth of a scaled gradient's norm from one step to the next; None for no limit."""
    caps_scale: bool = False
    """True if the scale stays below sqrt(S / R), where the gain of rank R would equal that of full rank."""

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "Rule":
        """The rule that a parameter group spells out."""
        return cls(**{field: group[field] for field in cls.__dataclass_fields__})

    @property
    def is_spectral(self) -> bool:
        """True if updates are orthogonalised."""
        return self.granularity == "spectral"

    @property
    def limits_growth(self) -> bool:
        """The limiter measures scaled gradients, so rules without one have nothing for it to measure."""
        scales = self.granularity in ("channel", "tensor")
        return self.growth_limit is not None and (self.residual or scales)


STRUCTURED_ADAMW = Rule(projection="identity", granularity="channel", growth_limit=1.01)
APOLLO = Rule(projection="gaussian", granularity="channel", growth_limit=1.01)
APOLLO_MINI = Rule(projection="gaussian", granularity="tensor", growth_limit=1.01, caps_scale=True)
GALORE = Rule(projection="svd", granularity="element")
FIRA = Rule(projection="svd", granularity="element", residual=True, growth_limit=1.01)
ADAMW = Rule(projection="identity", granularity="element")
ROWWISE_ADAMW = Rule(projection="identity", granularity="element", second_moment="rowwise")
ADAFACTOR = Rule(projection="identity", granularity="element", second_moment="factored")
ARTEMIS = Rule(projection="identity", granularity="spectral")
ARTEMIS_MINI = Rule(projection="power", granularity="spectral")
FLORA = Rule(projection="gaussian", granularity="element", second_moment="factored")
