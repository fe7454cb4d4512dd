"""`python -m services.cache_broker`, `burstline broker`."""

from __future__ import annotations

import sys

from services.cache_broker.app import run
from services.cache_broker.config import BrokerSettings
from shared.config import CommonSettings, load
from shared.errors import BurstlineError
from shared.lifecycle import run_to_end


def main() -> None:
    """Run the broker; exits 1 with one line when something it stands on is missing."""
    settings, common = load(BrokerSettings), load(CommonSettings)
    try:
        run_to_end(run(settings, common))
    except BurstlineError as error:
        sys.stderr.write(f"broker: {error.message}\n")
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
