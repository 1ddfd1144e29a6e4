"""The folder of a run: what lies where, and whether it may be written to."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checkpoint import replace_text_
from .config import FREE, kept
from .settings import check_unchanged, save_settings, saved_settings


class RunFolder:
    """Paths of a run."""

    def __init__(self, path: Path):
        self.path = path
        self.settings = path / "config.yaml"
        self.facts = path / "run.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.curves = path / "curves.png"
        self.model = path / "model"

    def check(self, options: Mapping[str, Any], resume: bool) -> None:
        """Raise ValueError where a run with these options cannot begin or go on here."""
        if not self.settings.exists():
            return
        if not resume:
            raise ValueError(
                f"{self.path} already holds a run; --resume continues it, and another --out keeps a new one apart"
            )
        check_unchanged(saved_settings(self.settings), kept(dict(options)), FREE)

    def write_settings(self, options: Mapping[str, Any]) -> None:
        """Keep the options of the run."""
        self.path.mkdir(parents=True, exist_ok=True)
        save_settings(self.settings, kept(dict(options)))

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        """Raise ValueError where one of these is not what it was when the run began."""
        known = self._facts()
        for name, value in facts.items():
            if known.get(name, value) != value:
                raise ValueError(
                    f"the {name} is not the one that the run in {self.path} began with: its files have changed. Bring "
                    "them back, or begin another run in another --out"
                )

    def add_facts(self, facts: Mapping[str, Any]) -> None:
        """Add to `run.json`."""
        replace_text_(self.facts, json.dumps({**self._facts(), **facts}, indent=2) + "\n")

    def add_session(self, session: Mapping[str, Any]) -> None:
        """Add to `run.json` where and how the run began, or was resumed."""
        self.add_facts({"sessions": [*self._facts().get("sessions", []), session]})

    def _facts(self) -> dict[str, Any]:
        return json.loads(self.facts.read_text(encoding="utf-8")) if self.facts.exists() else {}
