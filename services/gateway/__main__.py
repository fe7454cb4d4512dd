"""`python -m services.gateway`: the gateway as a process.

On SIGTERM readiness fails first, so that a balancer stops sending; then the listener closes and what runs may finish
within the drain limit (FR-124); then everything is given back.
"""

from __future__ import annotations

import logging
import sys

from services.gateway.app import run
from services.gateway.config import GatewaySettings
from services.gateway.vocabulary import ModelFolderError
from shared import telemetry
from shared.config import CommonSettings, load
from shared.errors import BurstlineError
from shared.lifecycle import run_to_end

_log = logging.getLogger(__name__)


def main() -> None:
    """Read the settings, run, leave with 0 after a drain and with 1 after a fault."""
    common, settings = load(CommonSettings), load(GatewaySettings)
    told = telemetry.setup("gateway", common)
    try:
        run_to_end(run(settings, common, told))
    except (BurstlineError, ModelFolderError) as error:
        _log.critical("the gateway cannot run: %s", error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        told.shutdown()


if __name__ == "__main__":
    main()
