"""The `burstline` command. Each subcommand imports what it needs when it runs, so that an image with one service's
extra can run that service, and `--help` is quick. What is missing is said by the name of the extra."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer

from services.chaos.schedule import Kind
from shared.errors import BurstlineError

app = typer.Typer(
    name="burstline",
    help="Language models for agents from a durable queue. Settings are environment variables: docs/operations.md.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

EVERYTHING: Final = "demo"
KINDS: Final = ", ".join(Kind)
# Sub-commands that live with their owner: name -> (module, its typer app, extra, help).
DELEGATED: Final = {
    "tenant": ("services.administration", "tenant", "broker", "Create, list and disable tenants."),
    "key": ("services.administration", "key", "broker", "Create, list and revoke API keys."),
    "quota": ("services.administration", "quota", "broker", "Show and set a tenant's limits."),
    "entries": ("services.administration", "entries", "broker", "List and delete prefix entries."),
    "audit": ("services.administration", "audit", "broker", "Check that ledger, entries and bytes agree."),
    "model": ("services.models.command", "app", EVERYTHING, "Add, list and remove public models."),
    "dead": ("services.dead_command", "app", "broker", "Read, requeue and drop dead letters."),
    "trace": ("services.trace", "app", EVERYTHING, "Draw a request's trace as a waterfall."),
    "bench": (
        "services.bench.command",
        "app",
        EVERYTHING,
        "Measure speed against a baseline of the same run.",
    ),
}


def fail(message: str, status: int = 1) -> NoReturn:
    """Say what is wrong and leave."""
    print(f"burstline: {message}", file=sys.stderr)
    raise SystemExit(status)


def load(module: str, extra: str) -> Any:
    """Import a module of ours; a package that is not installed is told by the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("services", "shared", "kernels", ""):
            raise
        fail(f"{missing} is not installed: pip install 'burstline[{extra}]'", 2)


def _delegate(name: str, module: str, attribute: str, extra: str, text: str) -> None:
    def command(context: typer.Context) -> None:
        target: Callable[..., None] = getattr(load(module, extra), attribute)
        target(args=list(context.args), prog_name=f"burstline {name}")

    app.command(
        name=name,
        help=text,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        add_help_option=False,  # --help goes to the sub-command
    )(command)


Chosen = Annotated[
    str | None, typer.Option("--model", help="A name of `burstline model list`, or a Hugging Face folder.")
]
Supervised = Annotated[str, typer.Option("--supervised-by", hidden=True)]


def _served(model: str | None) -> str:
    """What the chosen model is called in requests, after the services were told of it; without a choice, what ships."""
    try:
        name: str = load("services.models.serving", EVERYTHING).serve(model) if model else "pocket"
    except BurstlineError as fault:
        fail(fault.message)
    return name


@app.command()
def up(
    gateways: Annotated[
        int, typer.Option(min=1, max=64, help="How many; all but the first on free ports.")
    ] = 1,
    workers: Annotated[int, typer.Option(min=1, max=64, help="How many.")] = 1,
    brokers: Annotated[int, typer.Option(min=1, max=64, help="How many.")] = 1,
    model: Chosen = None,
) -> None:
    """Run the whole stack on this machine until Ctrl-C (settings: BURSTLINE_EMBEDDED_...)."""
    sizes = load("services.embedded.sizes", EVERYTHING).Sizes(
        gateways=gateways, workers=workers, brokers=brokers
    )
    raise SystemExit(load("services.embedded.up", EVERYTHING).main(sizes, model=_served(model)))


@app.command()
def demo(
    data_dir: Annotated[Path, typer.Option(help="The demo's own data folder.", file_okay=False)] = Path(
        ".burstline/demo"
    ),
    model: Chosen = None,
    started: Annotated[int, typer.Option(hidden=True)] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the result here.")] = None,
) -> None:
    """Hold a three-turn agent chat through the whole line and show what was reused, drafted and traced."""
    raise SystemExit(
        load("services.demo.run", EVERYTHING).main(
            model=_served(model), data_dir=data_dir, started_s=started, json_file=json_file
        )
    )


@app.command()
def gateway(supervised_by: Supervised = "") -> None:
    """Run the gateway (settings: BURSTLINE_GATEWAY_...)."""
    load("services.gateway.__main__", "gateway").main()


@app.command()
def worker(supervised_by: Supervised = "") -> None:
    """Run a worker (settings: BURSTLINE_WORKER_...)."""
    load("services.gpu_worker.__main__", "worker").main()


@app.command()
def broker(supervised_by: Supervised = "") -> None:
    """Run the cache broker (settings: BURSTLINE_BROKER_..., BURSTLINE_DATABASE_URL)."""
    load("services.cache_broker.__main__", "broker").main()


for _name, _parts in DELEGATED.items():
    _delegate(_name, *_parts)


@app.command()
def prove(
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Every cell, or a covering set of them (minutes).")
    ] = False,
    seed: Annotated[int, typer.Option(help="Which cells of a covering set, and who comes when.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the result here.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="On a card: bfloat16 (the default there), float8 weights or float32.")
    ] = None,
) -> None:
    """Show that one request has one stream: whatever the drafter, the company, the cache and the cuts."""
    raise SystemExit(
        load("services.prove.command", EVERYTHING).main(
            everything=full, seed=seed, json_file=json_file, device=device, dtype=dtype
        )
    )


@app.command()
def chaos(
    minutes: Annotated[float, typer.Option(min=0.1, help="How long faults come.")] = 5.0,
    count: Annotated[int | None, typer.Option(min=1, help="So many faults instead, however long.")] = None,
    seed: Annotated[int, typer.Option(help="Of the faults and of the requests.")] = 1,
    kind: Annotated[
        list[str] | None, typer.Option(help=f"Only these faults, all without it: {KINDS}.")
    ] = None,
    every_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two faults, on average.")] = 4.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the result here.")] = None,
) -> None:
    """Kill, stop, cut and fill every part of the line under load: nothing lost, nothing twice, everything returns."""
    kinds = load("services.chaos.schedule", EVERYTHING).chosen(kind)
    raise SystemExit(
        load("services.chaos.command", EVERYTHING).main(
            minutes=minutes, count=count, seed=seed, kinds=kinds, every_s=every_s, json_file=json_file
        )
    )


@app.command()
def version() -> None:
    """Print the version."""
    print(metadata.version("burstline"))


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
