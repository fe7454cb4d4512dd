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
    card_block,
    card_decode,
    card_engine,
    card_peers,
    card_prefill,
    card_restore,
    card_spec,
)
from services.bench.card_record import PROMISED_RECIPE, PROMISED_SHAPE, Record
from services.gpu_worker.engine.config import ModelDims
from services.gpu_worker.engine.models.loader import LoadedModel
from shared.errors import BurstlineError

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
        record = _record("decode", shape, layers, loaded, ceilings, json_file)
        record.add("weights_bytes", card.weight_bytes(dims, item=card.weight_item(loaded.model.recipe)))
        steps = card_decode.run_card_decode(loaded, ceilings, batches, (4, 8, 16), row=record.rows("steps"))
        record.hold(card_decode.bars(steps))
        card_peers.release()
        engine = card_engine.run_card_engine(loaded, batches, row=record.rows("engine"))
        record.hold(card_engine.bars(engine, steps))
        if spec:
            card_peers.release()
            record.add("draft_vocab", draft_vocab)
            drafter = card_block.drawn_drafter(loaded)
            rounds = card_spec.run_card_spec(loaded, batches, drafter=drafter, row=record.rows("speculation"))
            record.hold(card_spec.bars(rounds))
        if peers:
            del loaded
            _against_peers(shape, dims, ceilings, batches, layers, record)
    _table("round", steps, ("round_ms", "graph_ms", "host_ms", "floor_ms", "over_floor"))
    _end(record)


def _against_peers(
    shape: str,
    dims: ModelDims,
    ceilings: card.Ceilings,
    batches: Sequence[int],
    layers: int | None,
    record: Record,
) -> None:
    """Adds the peers' figures; each has the card for itself."""
    card_peers.release()
    free = card_peers.free_steps(dims, ceilings, batches, record.rows("free_cublas"))
    record.hold(card_peers.free_bars(record.results["steps"], free))
    card_peers.release()
    theirs = round(card_peers.transformers_step_ms(shape, layers), 2)
    record.add("transformers_ms", theirs)
    record.hold([card_peers.transformers_bar(record.results["steps"]["1 x 1"]["mean_round_ms"], theirs)])


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
    record = _record("prefill", shape, layers, loaded, ceilings, json_file)
    record.add("chunk", chunk)
    figures = card_prefill.run_card_prefill(
        loaded, tuple(length or (8192, 24576)), chunk=chunk, row=record.rows("prompts")
    )
    columns = ("cold_s", "cold_tflops", "again_s", "again_cached", "again_mtp_s", "again_mtp_cached")
    _table("tokens", figures, columns)
    record.hold(card_prefill.bars(figures))
    if peers:
        del loaded
        card_peers.release()
        free = card_prefill.run_card_prefill(
            card.model(dims, "free"),
            tuple(length or (8192,))[:1],
            chunk=chunk,
            row=record.rows("free_cublas"),
        )
        record.hold(card_prefill.free_bars(figures, free))
    _end(record)


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
    record = _record("restore", shape, layers, loaded, ceilings, json_file)
    record.add("host_to_card_bytes_per_s", round(ceilings.host_to_card_bytes_per_s))
    figures = card_restore.run_card_restore(
        loaded, ceilings, chunk=4096, host_bytes=int(host_gib * 2**30), report=_progress
    )
    record.add("restore", figures)
    record.hold(card_restore.bars(figures))
    _end(record)


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


def _record(
    what: str,
    shape: str,
    layers: int | None,
    loaded: LoadedModel,
    ceilings: card.Ceilings,
    json_file: Path | None,
) -> Record:
    """The evidence of a run, with what every run begins with."""
    recipe = loaded.model.recipe
    asked = f"bench {what} --device cuda --shape {shape}"
    return Record(
        asked if recipe == PROMISED_RECIPE else f"{asked} --recipe {recipe}",
        json_file,
        {
            "shape": shape,
            **card.describe(loaded.dims),
            "recipe": recipe,
            "copy_bytes_per_s": round(ceilings.copy_bytes_per_s),
        },
        promised=shape == PROMISED_SHAPE and layers is None and recipe == PROMISED_RECIPE,
    )


def _end(record: Record) -> None:
    """Exit with 1 when a bar does not hold."""
    raise typer.Exit(0 if record.end() else 1)


if __name__ == "__main__":
    try:
        app()
    except (BurstlineError, OSError, metadata.PackageNotFoundError) as fault:
        sys.stderr.write(f"burstline: bench could not measure: {fault}\n")
        raise SystemExit(2) from fault
