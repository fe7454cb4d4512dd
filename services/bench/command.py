"""`burstline bench`: the command line of the benchmarks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from services.bench import card_command
from services.bench.cache import Results as CacheResults
from services.bench.cache import bars as cache_bars
from services.bench.cache import run_cache
from services.bench.decode import bars as decode_bars
from services.bench.decode import run_decode
from services.bench.load import RULES, Load
from services.bench.queue import bars as queue_bars
from services.bench.queue import run_queue
from services.bench.soak import REQUESTS, run_soak
from services.bench.spec import BATCHES, REPEATS, Results, StreamsDiffer, bars, run_spec
from services.bench.stall import Results as StallResults
from services.prove.evidence import evidence
from services.prove.models import pocket, smallest
from shared.errors import BurstlineError
from shared.evidence import Bar, write

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Measure speed against a baseline of the same run."
)


@app.callback()
def _group() -> None:
    """Measure speed against a baseline of the same run."""


@app.command()
def spec(
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the result here.")] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Streams at once; may be given more than once.")
    ] = None,
    rule: Annotated[list[str] | None, typer.Option(help="greedy or sampled; both without it.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats of every drafter.")] = REPEATS,
) -> None:
    """Every drafter against plain decode: tokens a verify, forwards a token, acceptance, speed-up."""
    unknown = set(rule or ()) - set(RULES)
    if unknown:
        raise typer.BadParameter(
            f"{', '.join(sorted(unknown))} is none of {', '.join(RULES)}", param_hint="--rule"
        )
    loads = [Load(rule=one, batch=size) for one in rule or RULES for size in batch or BATCHES]
    try:
        results = run_spec(pocket(), loads, repeats=repeats, report=_progress)
    except StreamsDiffer as fault:
        sys.stderr.write(f"burstline: {fault}\n")
        raise typer.Exit(1) from fault
    except (BurstlineError, OSError) as fault:
        sys.stderr.write(f"burstline: bench could not measure: {fault}\n")
        raise typer.Exit(2) from fault
    Console().print(_table(results))
    _end("bench spec", {"threads": 1, "repeats": repeats, "loads": results}, bars(results), json_file)


@app.command()
def decode(
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the result here.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats.")] = REPEATS,
    device: Annotated[str, typer.Option(help="cpu, or cuda for a shape on a card.")] = "cpu",
    shape: Annotated[str, typer.Option(help="On a card: a folder of models/shapes.")] = "27b",
) -> None:
    """Plain decode by batch, against the bare forward; on a card a shape's steps against the bytes that must move."""
    if device != "cpu":
        card_command.decode(device=device, shape=shape, json_file=json_file)
    try:
        results = run_decode(pocket(), BATCHES, repeats=repeats, report=_progress)
    except (BurstlineError, OSError) as fault:
        sys.stderr.write(f"burstline: bench could not measure: {fault}\n")
        raise typer.Exit(2) from fault
    Console().print_json(data=results)
    _end("bench decode", {"threads": 1, "repeats": repeats} | results, decode_bars(results), json_file)


app.command()(card_command.prefill)
app.command()(card_command.restore)


@app.command()
def cache(
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the result here.")] = None,
) -> None:
    """What the prefix cache saves agents: tokens served, time to the first token, against other ways to cache."""
    try:
        results = run_cache(pocket(), report=_progress)
    except (BurstlineError, OSError) as fault:
        sys.stderr.write(f"burstline: bench could not measure: {fault}\n")
        raise typer.Exit(2) from fault
    Console().print(_cache_table(results))
    Console().print(_stall_table(results["stall"]))
    _end("bench cache", {"threads": 1} | results, cache_bars(results), json_file)


@app.command()
def soak(
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the result here.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests to ask.")] = REQUESTS,
    seed: Annotated[int, typer.Option(help="Of the requests and of what goes wrong.")] = 0,
) -> None:
    """Random requests, faults, cancels and preemptions: every stream right, every pool at its baseline."""
    try:
        results, told = run_soak(smallest(), requests=requests, seed=seed, report=_progress)
    except (BurstlineError, OSError) as fault:
        sys.stderr.write(f"burstline: bench could not measure: {fault}\n")
        raise typer.Exit(2) from fault
    for end, count in results["ends"].items():
        sys.stdout.write(f"ended with {end}: {count} requests\n")
    for error in results["errors_unexplained"]:
        sys.stderr.write(f"{error}\n")
    _end("bench soak", {"threads": 1} | results, told, json_file)


@app.command()
def queue(
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the result here.")] = None,
    litellm: Annotated[
        Path | None, typer.Option(help="A virtual environment with litellm[proxy], to compare with.")
    ] = None,
) -> None:
    """What gateway and queue add to the first token and to each burst, with an engine that is instant."""
    try:
        results = run_queue(litellm=litellm, report=_progress)
    except (BurstlineError, OSError, TimeoutError) as fault:
        sys.stderr.write(f"burstline: bench could not measure: {fault}\n")
        raise typer.Exit(2) from fault
    Console().print_json(data=results)
    told = queue_bars(results)
    if "not_measured" in results["litellm"] and all(bar.holds for bar in told):
        _write(json_file, "bench queue", results, told)
        sys.stderr.write(f"burstline: LiteLLM was not measured: {results['litellm']['not_measured']}\n")
        raise typer.Exit(2)
    _end("bench queue", results, told, json_file)


def _write(json_file: Path | None, command: str, shown: dict[str, Any], told: list[Bar]) -> None:
    """Write the evidence, if it is wanted."""
    if json_file is not None:
        write(json_file, evidence(command, shown, told))


def _end(command: str, shown: dict[str, Any], told: list[Bar], json_file: Path | None) -> None:
    """Write the evidence, tell the bars, exit with 1 when one does not hold."""
    _write(json_file, command, shown, told)
    for bar in told:
        sys.stdout.write(
            f"{bar.name}: {bar.value:g} {bar.unit}{'' if bar.holds else f'  NOT AS PROMISED, limit {bar.limit:g}'}\n"
        )
    raise typer.Exit(0 if all(bar.holds for bar in told) else 1)


def _progress(text: str) -> None:
    sys.stderr.write(text + "\n")


def _cache_table(results: CacheResults) -> Table:
    trace = results["trace"]
    title = f"{trace['prompts']} prompts of agents, {trace['tokens']} tokens, {trace['reusable']} of them seen before"
    table = Table(title=title, title_justify="left")
    table.add_column("cache", no_wrap=True)
    for name in ("computed", "reusable", "prompts", "a prompt"):
        table.add_column(name, justify="right")
    small = {f"small pools, {name}": figures for name, figures in results["policies_in_small_pools"].items()}
    for name, figures in (results["served"] | small).items():
        table.add_row(
            name,
            f"{figures['computed']}",
            f"{figures['share_of_reusable']:.1%}",
            f"{figures['share_of_prompts']:.1%}",
            f"{figures['computed_per_prompt']:.0f}",
        )
    return table


def _stall_table(results: StallResults) -> Table:
    title = f"Milliseconds between deliveries of {results['streams']} streams beside a prompt of {results['prompt_tokens']} tokens"
    table = Table(title=title, title_justify="left")
    for name in ("prompt primed", "idle p50", "p50", "p99", "max", "rows between"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, figures in results.items():
        if isinstance(figures, dict):
            busy = figures["while_priming_ms"]
            times = (figures["idle_ms"]["p50"], busy["p50"], busy["p99"], busy["max"])
            table.add_row(
                name, *(f"{value:.0f}" for value in times), str(figures["most_rows_between_deliveries"])
            )
    return table


def _acceptance(positions: list[float]) -> str:
    """Of the first and of the last draft of a round."""
    ends = positions if len(positions) < 2 else (positions[0], positions[-1])
    return " to ".join(f"{value:.2f}"[1:] if value < 1 else "1" for value in ends)


def _table(results: Results) -> Table:
    """Medians; the spreads are in the JSON. Fits 80 columns."""
    table = Table(
        title="Speculation against plain decode",
        title_justify="left",
        box=None,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("drafter", no_wrap=True)
    for name in ("a verify", "forwards", "accepted", "tok/s", "gain", "in CPU"):
        table.add_column(name, justify="right", no_wrap=True)
    for load, drafters in results.items():
        table.add_row(load, style="bold")
        for drafter, figures in drafters.items():
            table.add_row(
                drafter,
                f"{figures['tokens_per_verify']:.2f}",
                f"{figures['trunk_forwards_per_token']:.3f}",
                _acceptance(figures["acceptance_by_position"]),
                f"{figures['tokens_per_second']['median']:.0f}",
                f"{figures['speed_up_over_plain']['median']:.2f}",
                f"{figures['cpu_speed_up_over_plain']['median']:.2f}",
            )
    return table
