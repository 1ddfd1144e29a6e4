"""The data of a run: text from anywhere, tokenised once, read in an order that a seed decides."""

from ..display import Progress
from .batches import Batches, prefetched
from .config import Data
from .corpus import Corpus, check_data, prepared_corpus, validation_text
from .shards import TokenSet
from .tokenizer import Tokenizer, loaded_tokenizer

__all__ = [
    "Batches",
    "Corpus",
    "Data",
    "Progress",
    "TokenSet",
    "Tokenizer",
    "check_data",
    "loaded_tokenizer",
    "prefetched",
    "prepared_corpus",
    "validation_text",
]
