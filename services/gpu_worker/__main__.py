"""`python -m services.gpu_worker`, and `burstline worker`."""

from __future__ import annotations

import logging

from services.gpu_worker.app import run
from services.gpu_worker.config import WorkerSettings
from shared.config import CommonSettings, load
from shared.errors import BurstlineError
from shared.lifecycle import TaskDied, run_to_end


def main() -> None:
    """Run a worker until a signal. Exit status 1 when it could not start or a part of it died."""
    settings, common = load(WorkerSettings), load(CommonSettings)
    try:
        run_to_end(run(settings, common))
    except (BurstlineError, TaskDied) as error:
        logging.getLogger(__name__).critical("the worker stops: %s", error)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
