"""`burstline bench`: the command line of the benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console

from services.bench import card_command
from services.bench.cache import bars as cache_bars
from services.bench.cache import run_cache
from services.bench.decode import bars as decode_bars
from services.bench.decode import run_decode
from services.bench.drafters import EACH, MAX_TOKENS, run_drafters, shipped, without_cache
from services.bench.drafters import KINDS as DRAFTERS
from services.bench.drafters import bars as drafter_bars
from services.bench.held_out import KINDS, held_out
from services.bench.load import RULES, Load
from services.bench.queue import bars as queue_bars
from services.bench.queue import run_queue
from services.bench.soak import REQUESTS, run_soak
from services.bench.spec import BATCHES, REPEATS, StreamsDiffer, bars, run_spec
from services.bench.tables import cache_table, drafter_table, load_table, stall_table
from services.gpu_worker.engine.requests import DrafterKind
from services.prove.evidence import evidence
from services.prove.models import pocket, smallest
from shared.errors import BurstlineError
from shared.evidence import Bar, write
from shared.evidence import told as lines

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Measure speed against a baseline of the same run."
)

Name = TypeVar("Name", bound=str)


@app.callback()
def _group() -> None:
    """Measure speed against a baseline of the same run."""


@app.command()
def spec(
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the result here.")] = None,
    drafter: Annotated[list[str] | None, typer.Option(help="mtp, block or ngram; all without it.")] = None,
    text: Annotated[list[str] | None, typer.Option(help="chat, tools, code or text; all without it.")] = None,
    each: Annotated[int, typer.Option(min=1, max=EACH, help="Prompts of a kind.")] = EACH,
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, help="The table by load: streams at once; may be given more than once."),
    ] = None,
    rule: Annotated[
        list[str] | None, typer.Option(help="The table by load: greedy or sampled; both without it.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Of the table by load, interleaved.")] = REPEATS,
) -> None:
    """Drafters on held-out text: tokens a verify, acceptance, speed-up, and the same without a cache; or, with --batch or
    --rule, every drafter against plain decode by load."""
    if not batch and not rule:
        _drafters(_of(DRAFTERS, drafter, "--drafter"), _of(KINDS, text, "--text"), each, json_file)
    if drafter or text:
        raise typer.BadParameter(
            "--drafter and --text choose held-out text, --batch and --rule the table by load"
        )
    rules = _of(tuple(RULES), rule, "--rule")
    loads = [Load(rule=one, batch=size) for one in rules for size in batch or BATCHES]
    with _measuring():
        results = run_spec(shipped(DRAFTERS), loads, repeats=repeats, report=_progress)
    Console().print(load_table(results))
    told = _told("--rule", rules, ()) + _told("--batch", batch or BATCHES, BATCHES)
    _end(
        f"bench spec{told} --repeats {repeats}",
        {"threads": 1, "repeats": repeats, "loads": results},
        bars(results),
        json_file,
    )


def _of(known: Sequence[Name], given: Sequence[str] | None, option: str) -> list[Name]:
    """Those of `known` that were given; all without any."""
    unknown = set(given or ()) - set(known)
    if unknown:
        raise typer.BadParameter(
            f"{', '.join(sorted(unknown))} is none of {', '.join(known)}", param_hint=option
        )
    return [name for name in known if given is None or name in given]


def _told(option: str, chosen: Collection[object], known: Collection[object]) -> str:
    """The option as a command has it: nothing where all are meant."""
    return "" if set(chosen) == set(known) else "".join(f" {option} {one}" for one in chosen)


def _drafters(
    kinds: Sequence[DrafterKind], texts: Sequence[str], each: int, json_file: Path | None
) -> NoReturn:
    prompts = [prompt for prompt in held_out(each) if prompt.kind in texts]
    with _measuring():
        model, history = shipped(kinds), without_cache(kinds)
        results, launches = run_drafters(model, prompts, history, kinds=kinds, report=_progress)
    Console().print(drafter_table(results))
    shown = {
        "threads": 1,
        "prompts": len(prompts),
        "tokens_of_a_prompt": MAX_TOKENS,
        "launch_seconds": launches,
        "drafters": results,
    }
    told = _told("--drafter", kinds, DRAFTERS) + _told("--text", texts, KINDS)
    told += f" --each {each}" if each < EACH else ""
    _end(f"bench spec{told}", shown, drafter_bars(results), json_file)


@contextmanager
def _measuring() -> Iterator[None]:
    """Exits with 1 when streams differ, with 2 when nothing could be measured."""
    try:
        yield
    except StreamsDiffer as fault:
        sys.stderr.write(f"burstline: {fault}\n")
        raise typer.Exit(1) from fault
    except (BurstlineError, OSError) as fault:
        sys.stderr.write(f"burstline: bench could not measure: {fault}\n")
        raise typer.Exit(2) from fault


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
    with _measuring():
        results = run_decode(pocket(), BATCHES, repeats=repeats, report=_progress)
    Console().print_json(data=results)
    _end("bench decode", {"threads": 1, "repeats": repeats} | results, decode_bars(results), json_file)


app.command()(card_command.prefill)
app.command()(card_command.restore)


@app.command()
def cache(
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the result here.")] = None,
) -> None:
    """What the prefix cache saves agents: tokens served, time to the first token, against other ways to cache."""
    with _measuring():
        results = run_cache(pocket(), report=_progress)
    Console().print(cache_table(results))
    Console().print(stall_table(results["stall"]))
    _end("bench cache", {"threads": 1} | results, cache_bars(results), json_file)


@app.command()
def soak(
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the result here.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests to ask.")] = REQUESTS,
    seed: Annotated[int, typer.Option(help="Of the requests and of what goes wrong.")] = 0,
) -> None:
    """Random requests, faults, cancels and preemptions: every stream right, every pool at its baseline."""
    with _measuring():
        results, told = run_soak(smallest(), requests=requests, seed=seed, report=_progress)
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
    with _measuring():
        results = run_queue(litellm=litellm, report=_progress)
    Console().print_json(data=results)
    told = queue_bars(results)
    command = "bench queue --litellm VENV" if litellm else "bench queue"
    if "not_measured" in results["litellm"] and all(bar.holds for bar in told):
        _write(json_file, command, results, told)
        sys.stderr.write(f"burstline: LiteLLM was not measured: {results['litellm']['not_measured']}\n")
        raise typer.Exit(2)
    _end(command, results, told, json_file)


def _write(json_file: Path | None, command: str, shown: dict[str, Any], told: list[Bar]) -> None:
    """Write the evidence, if it is wanted."""
    if json_file is not None:
        write(json_file, evidence(command, shown, told))


def _end(command: str, shown: dict[str, Any], told: list[Bar], json_file: Path | None) -> NoReturn:
    """Write the evidence, tell the bars, exit with 1 when one does not hold."""
    _write(json_file, command, shown, told)
    sys.stdout.write("".join(f"{line}\n" for line in lines(told)))
    raise typer.Exit(0 if all(bar.holds for bar in told) else 1)


def _progress(text: str) -> None:
    sys.stderr.write(text + "\n")
