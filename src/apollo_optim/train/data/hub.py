"""A Hugging Face dataset, streamed: only what a run wants is fetched."""

from collections.abc import Iterator
from typing import Any

from .config import Reading
from .readers import BATCH_BYTES, Batch, TooLong

DEFAULT_SPLIT = "train"


class HubDataset:
    """The documents of a dataset named org/name, org/name:config or org/name:config:split, in its own order."""

    text_bytes: int | None = None
    read_bytes = 0

    def __init__(self, option: str, value: str, reading: Reading):
        name, _, rest = value.partition(":")
        config, _, split = rest.partition(":")
        self.option = option
        self.name = value
        self.label = name.rpartition("/")[2]
        self.path = name, config or None, split or DEFAULT_SPLIT
        self.reading = reading
        self.identity = f"hub {name}:{config}:{split or DEFAULT_SPLIT}"

    def batches(self, position: Any = None) -> Iterator[Batch]:
        dataset = self._opened()
        row = 0
        if position is not None:
            state, row = position
            dataset.load_state_dict(state)
        examples = iter(dataset)
        while records := self._records(examples, row):
            first, row = row + 1, row + len(records)
            yield Batch(self.name, self.label, "row", records, first, [dataset.state_dict(), row], 0)

    def sample(self, limit: int) -> Iterator[Batch]:
        taken = 0
        for batch in self.batches():
            yield batch
            taken += sum(len(text or "") for text, _ in batch.records)
            if taken >= limit:
                return

    def _records(self, examples: Iterator[dict[str, Any]], row: int) -> list[tuple[Any, str | None]]:
        """The next examples, about a batch of them."""
        text_field, source_field, most = self.reading
        records: list[tuple[Any, str | None]] = []
        length = 0
        while length < BATCH_BYTES:
            try:
                example = next(examples, None)
            except Exception as error:
                raise ValueError(
                    f"{self.option} {self.name!r} stopped after {row + len(records):,} rows "
                    f"({type(error).__name__}: {error}): run the same command again to continue"
                ) from error
            if example is None:
                break
            for option, field in (("text_field", text_field), ("source_field", source_field)):
                if field is not None and field not in example:
                    raise ValueError(f"{self.name} has no field {option}={field!r}; it has: {', '.join(example)}")
            text = example[text_field]
            if isinstance(text, str) and len(text) > most:
                text = TooLong(most)
            records.append((text, None if source_field is None else str(example[source_field])))
            length += len(text) if isinstance(text, str) else 0
        return records

    def _opened(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise ValueError(
                f"{self.option} {self.name!r} is no file or folder here; as a Hugging Face dataset it needs: "
                "pip install datasets"
            ) from error
        name, config, split = self.path
        try:
            return datasets.load_dataset(name, config, split=split, streaming=True)
        except Exception as error:
            raise ValueError(
                f"{self.option} {self.name!r} is no file or folder here, and could not be opened as a Hugging Face "
                f"dataset org/name:config:split ({type(error).__name__}: {error}). Without a network, fetch the "
                "dataset's files elsewhere and name their folder"
            ) from error
