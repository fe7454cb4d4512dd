"""What the benchmarks show in the terminal. The spreads are in the JSON."""

from __future__ import annotations

from typing import Final

from rich.table import Table

from services.bench.cache import Results as CacheResults
from services.bench.drafters import Results as DrafterResults
from services.bench.spec import Results as LoadResults
from services.bench.stall import Results as StallResults


def cache_table(results: CacheResults) -> Table:
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


def stall_table(results: StallResults) -> Table:
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


def load_table(results: LoadResults) -> Table:
    """Medians of every drafter against plain decode, by load."""
    table = _narrow(
        "Speculation against plain decode", ("a verify", "forwards", "accepted", "tok/s", "gain", "in CPU")
    )
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


DRAFTER_LEGEND: Final = (
    "a verify: tokens. accepted: share of the drafts, at the first position to the last. in CPU: how many times less "
    "processor time a token takes than with none; expected: the same from tokens and launches. no cache: tokens a verify of "
    "some streams drafted from their whole history; cached: of the same streams as they are"
)


def drafter_table(results: DrafterResults) -> Table:
    """Every drafter by kind of text; `no cache` is of those streams that were drafted again without one, with the same
    streams' figure behind it."""
    table = _narrow(
        "Drafters on held-out text", ("a verify", "accepted", "in CPU", "expected", "no cache", "cached")
    )
    for group in next(iter(results.values()), {}):
        table.add_row(group, style="bold")
        for drafter, groups in results.items():
            figures, slow = groups[group], groups[group].get("reference", {})
            table.add_row(
                drafter,
                f"{figures['tokens_per_verify']:.2f}",
                _acceptance(figures["acceptance_by_position"]),
                f"{figures['cpu_speed_up_over_plain']:.2f}",
                f"{figures['expected_speed_up']:.2f}",
                *(f"{slow[name]:.2f}" if slow else "" for name in ("tokens_per_verify", "with_cache")),
            )
    table.caption, table.caption_justify = DRAFTER_LEGEND, "left"
    return table


def _narrow(title: str, columns: tuple[str, ...]) -> Table:
    """Of drafters; fits 80 columns."""
    table = Table(title=title, title_justify="left", box=None, collapse_padding=True, pad_edge=False)
    table.add_column("drafter", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table
