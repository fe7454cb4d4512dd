"""Where fetched models lie (`BURSTLINE_MODELS_DIR`)."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic_settings import SettingsConfigDict

from shared.config import Settings


class ModelSettings(Settings):
    """Read by the commands that fetch or choose a model."""

    model_config = SettingsConfigDict(env_prefix="BURSTLINE_MODELS_")

    dir: Path | None = None
    """None = `burstline/models` in the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`)."""

    def folder(self) -> Path:
        """Absolute."""
        if self.dir is not None:
            return self.dir.expanduser().absolute()
        cache = os.environ.get("XDG_CACHE_HOME", "")
        # As the XDG specification wants it: a relative value counts as none.
        base = Path(cache) if cache.startswith("/") else Path("~/.cache").expanduser()
        return base / "burstline" / "models"
