"""The data of a run: text from anywhere, tokenised once, read in an order that a seed decides."""

from .batches import Batches, prefetched
from .config import Data
from .corpus import Corpus, check_data, prepared_corpus, validation_text
from .progress import Progress
from .tokenizer import Tokenizer, loaded_tokenizer
from .tokens import TokenSet

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
