"""The benchmarks of a card: what `burstline bench ... --device cuda` runs. `python -m services.bench.card_command` runs
them where little else of the project is installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from services.bench import (
    card,
    card_decode,
    card_engine,
    card_peers,
    card_prefill,
    card_restore,
    card_spec,
)
from services.gpu_worker.engine.config import ModelDims
from services.prove.evidence import card as card_device
from shared.errors import BurstlineError
from shared.evidence import Bar, evidence, write
from shared.evidence import told as lines

app = typer.Typer(help="Measure a shape on this machine's card.", no_args_is_help=True)

Shape = Annotated[str, typer.Option(help="A folder of models/shapes.")]
Layers = Annotated[int | None, typer.Option(help="Only so many layers: a quick look, no evidence.")]
Device = Annotated[str, typer.Option(help="cuda: shapes are measured on a card.")]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the result here.")]
DRAFT_VOCAB = 32_768


@app.command()
def decode(
    device: Device = "cuda",
    shape: Shape = "27b",
    json_file: Json = None,
    layers: Layers = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences at once.")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Of products: card, card-fp8, padded, free (cuBLAS, not exact).")
    ] = None,
    spec: Annotated[bool, typer.Option(help="Also rounds with drafts.")] = True,
    draft_vocab: Annotated[int, typer.Option(help="Ids that drafts come from; 0 = all.")] = DRAFT_VOCAB,
    peers: Annotated[bool, typer.Option(help="Also free cuBLAS and transformers, after ours.")] = False,
) -> None:
    """Plain steps and verifies by batch, and rounds with drafts, against the bytes that must move."""
    batches = tuple(batch or (1, 8, 16, 64))
    with torch.no_grad():
        ceilings = _begin(device)
        dims = card.shape(shape, layers=layers)
        loaded = card.model(dims, recipe, draft_vocab=draft_vocab)
        results: dict[str, Any] = {
            "shape": shape,
            **card.describe(dims),
            "recipe": loaded.model.recipe,
            "weights_bytes": card.weight_bytes(dims, item=card.weight_item(loaded.model.recipe)),
            "copy_bytes_per_s": round(ceilings.copy_bytes_per_s),
            "steps": card_decode.run_card_decode(loaded, ceilings, batches, (4, 8, 16), report=_progress),
        }
        told = card_decode.bars(results["steps"])
        card_peers.release()
        results["engine"] = card_engine.run_card_engine(loaded, batches, report=_progress)
        told += card_engine.bars(results["engine"], results["steps"])
        if spec:
            card_peers.release()
            results["draft_vocab"] = draft_vocab
            results["speculation"] = card_spec.run_card_spec(loaded, batches, report=_progress)
            told += card_spec.bars(results["speculation"])
        if peers:
            del loaded
            told += _against_peers(shape, dims, ceilings, batches, layers, results)
    _table("round", results["steps"], ("round_ms", "graph_ms", "host_ms", "floor_ms", "over_floor"))
    _end(f"bench decode --device cuda --shape {shape}", results, told, json_file)


def _against_peers(
    shape: str,
    dims: ModelDims,
    ceilings: card.Ceilings,
    batches: Sequence[int],
    layers: int | None,
    results: dict[str, Any],
) -> list[Bar]:
    """Adds the peers' figures; each has the card for itself."""
    card_peers.release()
    results["free_cublas"] = card_peers.free_steps(dims, ceilings, batches, _progress)
    told = card_peers.free_bars(results["steps"], results["free_cublas"])
    card_peers.release()
    results["transformers_ms"] = round(card_peers.transformers_step_ms(shape, layers), 2)
    ours = results["steps"]["1 x 1"]["mean_round_ms"]
    return [*told, card_peers.transformers_bar(ours, results["transformers_ms"])]


@app.command()
def prefill(
    device: Device = "cuda",
    shape: Shape = "27b",
    json_file: Json = None,
    layers: Layers = None,
    length: Annotated[list[int] | None, typer.Option(help="Tokens of a prompt.")] = None,
    chunk: Annotated[int, typer.Option(help="Rows of a launch.")] = 4096,
    recipe: Annotated[str | None, typer.Option(help="Of products.")] = None,
    peers: Annotated[bool, typer.Option(help="Also free cuBLAS, after ours.")] = False,
) -> None:
    """Prompts, cold and again, with and without drafts; what captures cost."""
    ceilings = _begin(device)
    dims = card.shape(shape, layers=layers)
    loaded = card.model(dims, recipe)
    figures = card_prefill.run_card_prefill(
        loaded, tuple(length or (8192, 24576)), chunk=chunk, report=_progress
    )
    results = {
        "shape": shape,
        **card.describe(dims),
        "recipe": loaded.model.recipe,
        "copy_bytes_per_s": round(ceilings.copy_bytes_per_s),
        "prompts": figures,
    }
    _table(
        "tokens",
        {name: one for name, one in figures.items() if isinstance(one, dict)},
        ("cold_s", "cold_tflops", "again_s", "again_cached", "again_mtp_s", "again_mtp_cached"),
    )
    told = card_prefill.bars(figures)
    if peers:
        del loaded
        card_peers.release()
        free = card_prefill.run_card_prefill(
            card.model(dims, "free"), tuple(length or (8192,))[:1], chunk=chunk, report=_progress
        )
        results["free_cublas"] = free
        told += card_prefill.free_bars(figures, free)
    _end(f"bench prefill --device cuda --shape {shape}", results, told, json_file)


@app.command()
def restore(
    device: Device = "cuda",
    shape: Shape = "27b",
    json_file: Json = None,
    layers: Layers = None,
    host_gib: Annotated[float, typer.Option(help="Of the host tier.")] = 4.0,
) -> None:
    """An entry of 30,016 tokens from host memory, against the bare copy."""
    ceilings = _begin(device)
    dims = card.shape(shape, layers=layers)
    loaded = card.model(dims)
    figures = card_restore.run_card_restore(
        loaded, ceilings, chunk=4096, host_bytes=int(host_gib * 2**30), report=_progress
    )
    results = {
        "shape": shape,
        **card.describe(dims),
        "host_to_card_bytes_per_s": round(ceilings.host_to_card_bytes_per_s),
        "restore": figures,
    }
    _end(f"bench restore --device cuda --shape {shape}", results, card_restore.bars(figures), json_file)


def _begin(device: str) -> card.Ceilings:
    if device != "cuda" or not torch.cuda.is_available():
        reason = "torch sees no card here" if device == "cuda" else "a shape needs --device cuda"
        sys.stderr.write(f"burstline: bench could not measure: {reason}\n")
        raise typer.Exit(2)
    return card.ceilings()


def _progress(text: str) -> None:
    sys.stderr.write(text + "\n")


def _table(what: str, rows: dict[str, Any], columns: Sequence[str]) -> None:
    table = Table(title_justify="left")
    for name in (what, *columns):
        table.add_column(name, justify="right")
    for name, figures in rows.items():
        table.add_row(name, *(f"{figures[column]:g}" for column in columns))
    Console().print(table)


def _end(command: str, results: dict[str, Any], told: Sequence[Bar], json_file: Path | None) -> None:
    """Tell the bars, write the evidence; exit with 1 when a bar does not hold."""
    sys.stdout.write("".join(f"{line}\n" for line in lines(told)))
    if json_file is not None:
        write(json_file, evidence(command, results, told, device=card_device()))
    raise typer.Exit(0 if all(bar.holds for bar in told) else 1)


if __name__ == "__main__":
    try:
        app()
    except (BurstlineError, OSError, metadata.PackageNotFoundError) as fault:
        sys.stderr.write(f"burstline: bench could not measure: {fault}\n")
        raise SystemExit(2) from fault
