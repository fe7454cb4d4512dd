"""`python -m services.cache_broker`, `burstline broker`."""

from __future__ import annotations

import asyncio
import sys

from services.cache_broker.app import run
from services.cache_broker.config import BrokerSettings
from shared.config import CommonSettings, load
from shared.errors import BurstlineError


def main() -> None:
    """Run the broker; exits 1 with one line when something it stands on is missing."""
    settings, common = load(BrokerSettings), load(CommonSettings)
    try:
        asyncio.run(run(settings, common))
    except BurstlineError as error:
        sys.stderr.write(f"broker: {error.message}\n")
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
