"""The perplexity of a trained model on text, by source."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..flags import Place, check_each, check_unused
from ..train.attention import use_causal_attention_
from ..train.config import saved_options
from ..train.data.batches import windows_in_order
from ..train.data.config import Data, default_cache
from ..train.data.corpus import prepared_corpus, validation_text
from ..train.data.shards import TokenSet
from ..train.data.tokenizer import Tokenizer, loaded_tokenizer
from ..train.display import Display
from ..train.loop import ALL, validation_losses
from ..train.losses import Objective
from ..train.metrics import perplexity
from ..train.model import silence_libraries
from ..train.model_files import check_positions, check_vocabulary
from ..train.pretrain import PretrainOptions
from ..train.ranks import Ranks, device_of
from ..train.run import RunFolder, tokenizer_folder
from .model import ModelPlace, loaded_model, model_folder, place_of

SEQUENCE = 256
"""Default of --sequence, as in the paper."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Measure the perplexity of a model, over all text and by source, or its score on tasks."""

    model: Place
    """Folder of a finished run, a Hugging Face model's folder or org/name, or a .gguf file."""
    data: Place | None = None
    """Text, given as in `apollo pretrain`, all of it; by default the validation text of the run."""
    tokenizer: Place | None = None
    """As in `apollo pretrain`; by default the model's own."""
    text_field: str = "text"
    """Where JSON lines, parquet files and Hugging Face datasets keep the text."""
    source_field: str | None = None
    """Where they name a document's source; by default the file's name is its source."""
    sequence: int | None = None
    """Tokens of a sequence; by default those that the run was trained with, or 256."""
    tokens: int = 10_000_000
    """Tokens to read of each source at most."""
    micro_batch: int = 16
    """Sequences that are read at once."""
    device: Literal["cpu", "cuda"] | None = None
    """By default cuda where there is a GPU."""
    dtype: Literal["bf16", "fp32"] | None = None
    """Dtype of the weights; by default bf16 on a GPU and fp32 on a CPU."""
    cache: Path | None = None
    """Folder for tokens, which are made once; by default the run's, or that of `apollo pretrain`."""
    trust_remote_code: bool = False
    """Run the Python code that comes with a model or tokenizer; without it, one that needs its own is refused."""
    json: bool = False
    """Print JSON."""

    def check(self) -> None:
        """Raise ValueError for the first option that cannot be; nothing is loaded."""
        check_each(self, "at least 1", lambda number: number >= 1, "tokens", "micro_batch")
        check_each(self, "at least 2 tokens", lambda length: length >= 2, "sequence")
        device_of(self.device)
        if self.data is None:
            why = "without --data: the validation text of a run is read as the run has read it"
            check_unused(self, why, ("tokenizer", "text_field", "source_field"))


def scores(options: EvalOptions) -> dict[str, Any]:
    """Tokens, loss and perplexity by source and over all, with the model and the length of a sequence."""
    options.check()
    silence_libraries()
    place, device, trusted = place_of(options.model), device_of(options.device), options.trust_remote_code
    run = _run_of(place)
    sequence = options.sequence or (run.schedule.sequence if run else SEQUENCE)
    if options.tokenizer is None:
        folder = tokenizer_folder("MODEL", model_folder(place, device, options.dtype))
        tokenizer = loaded_tokenizer(folder, trusted, "the tokenizer of MODEL")
    else:
        tokenizer = loaded_tokenizer(options.tokenizer, trusted)
    sets = _text(options, place, run, tokenizer)
    sources = windows_in_order(sets, sequence, options.tokens)
    if not sources:
        raise ValueError(f"too little text: no source has a sequence of {sequence + 1} tokens")
    needed = max(tokens.largest_id for tokens in sets.values()) + 1
    model, _ = loaded_model(place, device, options.dtype, trusted, options.tokenizer)
    check_vocabulary(f"MODEL {options.model}", model.config, needed)
    check_positions(getattr(model.config, "max_position_embeddings", None), sequence)
    use_causal_attention_(model)
    ranks = Ranks(rank=0, world=1, device=device)
    losses = validation_losses(Objective(model), sources, options.micro_batch, ranks)
    tokens = {name: count * sequence for name, (_, count) in sources.items()}
    tokens[ALL] = sum(tokens.values())
    return {
        "model": options.model,
        "sequence": sequence,
        "sources": {
            name: {"tokens": tokens[name], "loss": loss, "perplexity": perplexity(loss)}
            for name, loss in losses.items()
        },
    }


def _run_of(place: ModelPlace) -> PretrainOptions | None:
    """The options of the run that pretrained the model; None if there is none."""
    # A fine-tuned run has examples, and no text to measure a perplexity on.
    if place.run is None or not (run := RunFolder(place.run)).settings.exists() or run.is_tuned:
        return None
    return saved_options(run.settings, PretrainOptions).located(run.places)


def _text(
    options: EvalOptions, place: ModelPlace, run: PretrainOptions | None, tokenizer: Tokenizer
) -> dict[str, TokenSet]:
    """Tokens by source, of the text in --data or else of the run's validation text."""
    with Display() as screen:
        if options.data is None:
            if run is None:
                raise ValueError(
                    "--data must name the text: a model by itself, or a fine-tuned one, has none of its own"
                )
            assert place.run is not None  # the folder of these options
            data = run.data if options.cache is None else replace(run.data, cache=options.cache)
            trusted = options.trust_remote_code
            tokens = RunFolder(place.run).fact("tokens_wanted", run.tokens_read)
            return prepared_corpus(data, tokens_wanted=tokens, report=screen, trust_remote_code=trusted).validation
        own = {"text_field": options.text_field, "source_field": options.source_field}
        cache = options.cache or default_cache()
        data = Data(data=options.data, tokenizer=options.tokenizer, cache=cache, **own)
        return validation_text(data, tokenizer, report=screen)
