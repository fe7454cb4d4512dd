"""The tools of the generated dialogues: schema, arguments, result and wording of each.

A tool has several names and each parameter several spellings, so that the model learns to copy them from the schema
instead of knowing them by heart. Numbers come from the tool's result, never from the model.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import Any, Final

from models.pocket.recipe.wordings import CITIES, ITEMS, NAMES

JsonObject = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One use: argument values by parameter key, the tool's result, and what the wordings may mention."""

    values: JsonObject
    result: JsonObject
    slots: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    key: str
    names: tuple[str, ...]
    type: str


@dataclass(frozen=True, kw_only=True)
class Tool:
    """`make(rng)` draws a case; `asks` are the user's wordings, `follows` those of a follow-up, `answer` the reply. `nouns`
    and `verbs` go into the general forms of `wordings`."""

    names: tuple[str, ...]
    about: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    make: Callable[[random.Random], Case]
    asks: tuple[str, ...]
    follows: tuple[str, ...]
    answer: str
    nouns: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ()
    refine: Callable[[random.Random, Case], Case] | None = None


def _number(value: float) -> int | float:
    """At most two decimals; whole numbers as int, as a tool would print them."""
    rounded = round(value, 2)
    return int(rounded) if rounded == int(rounded) else rounded


# one family a row: unit -> factor to the family's base unit
FAMILIES: Final[tuple[dict[str, float], ...]] = (
    {"km": 1000.0, "miles": 1609.344, "m": 1.0, "feet": 0.3048, "yards": 0.9144, "cm": 0.01, "inches": 0.0254, "meters": 1.0,
     "kilometers": 1000.0, "mm": 0.001},
    {"kg": 1000.0, "pounds": 453.59237, "g": 1.0, "ounces": 28.349523, "tons": 1e6, "grams": 1.0, "lb": 453.59237, "kilograms": 1000.0},
    {"liters": 1.0, "gallons": 3.785412, "ml": 0.001, "cups": 0.236588, "pints": 0.473176, "litres": 1.0},
    {"hours": 3600.0, "minutes": 60.0, "seconds": 1.0, "days": 86400.0, "weeks": 604800.0},
    {"MB": 1e6, "GB": 1e9, "KB": 1e3, "TB": 1e12, "bytes": 1.0, "MiB": 1048576.0, "GiB": 1073741824.0},
    {"km/h": 1.0, "mph": 1.609344, "m/s": 3.6, "knots": 1.852},
)  # fmt: skip


def _units(rng: random.Random) -> Case:
    if rng.random() < 0.1:
        value, celsius = rng.randint(-20, 120), rng.random() < 0.5
        start, end = ("celsius", "fahrenheit") if celsius else ("fahrenheit", "celsius")
        out = value * 1.8 + 32 if celsius else (value - 32) / 1.8
    else:
        family = rng.choice(FAMILIES)
        start, end = rng.sample(list(family), 2)
        value = rng.choice(
            (rng.randint(1, 20), rng.randint(1, 100), rng.randint(100, 5000), round(rng.uniform(0.1, 50), 1))
        )
        out = value * family[start] / family[end]
    result = {"result": _number(out), "unit": end}
    return Case(
        values={"value": value, "from": start, "to": end},
        result=result,
        slots={"value": str(value), "from": start, "to": end},
    )


def _units_again(rng: random.Random, last: Case) -> Case:
    for _ in range(20):
        case = _units(rng)
        if case.values["from"] == last.values["from"] and case.values["to"] == last.values["to"]:
            return case
    return _units(rng)


def _expression(rng: random.Random, first: float | None = None) -> Case:
    a = (
        first
        if first is not None
        else rng.choice(
            (rng.randint(2, 20), rng.randint(2, 99), rng.randint(10, 999), rng.randint(1000, 9999))
        )
    )
    b = rng.choice((rng.randint(2, 12), rng.randint(2, 99), rng.randint(10, 999)))
    op, word, total = rng.choice(
        (("*", "times", a * b), ("+", "plus", a + b), ("-", "minus", a - b), ("/", "divided by", a / b))
    )
    said = rng.random() < 0.6
    return Case(
        values={"expression": f"{a} {op} {b}"},
        result={"result": _number(total)},
        slots={
            "shown": f"{a} {word} {b}" if said else f"{a} {op} {b}",
            "tail": f"{word} {b}",
            "expr": f"{a} {op} {b}",
        },
    )


def _expression_again(rng: random.Random, last: Case) -> Case:
    return _expression(rng, last.result.get("result", 7))


def _day(rng: random.Random) -> date:
    return date(2024, 1, 1) + timedelta(days=rng.randint(0, 1500))


def _between(rng: random.Random) -> Case:
    start = _day(rng)
    end = start + timedelta(days=rng.randint(1, 400))
    return Case(
        values={"start": str(start), "end": str(end)},
        result={"days": (end - start).days},
        slots={"start": str(start), "end": str(end)},
    )


def _shift(rng: random.Random) -> Case:
    start, days = _day(rng), rng.randint(1, 120)
    return Case(
        values={"date": str(start), "days": days},
        result={"date": str(start + timedelta(days=days))},
        slots={"date": str(start), "days": str(days)},
    )


def _weekday(rng: random.Random) -> Case:
    day = _day(rng)
    return Case(values={"date": str(day)}, result={"weekday": day.strftime("%A")}, slots={"date": str(day)})


def _weather(rng: random.Random) -> Case:
    city = rng.choice(CITIES)
    sky = rng.choice(("sunny", "cloudy", "rainy", "windy", "clear", "foggy", "snowy"))
    return Case(
        values={"city": city}, result={"temperature": rng.randint(-10, 38), "sky": sky}, slots={"city": city}
    )


def _clock(rng: random.Random) -> Case:
    city = rng.choice(CITIES)
    return Case(
        values={"city": city},
        result={"time": f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"},
        slots={"city": city},
    )


def _currency(rng: random.Random) -> Case:
    start, end = rng.sample(("EUR", "USD", "GBP", "JPY", "CHF", "SEK", "NOK", "CAD", "AUD", "PLN"), 2)
    amount = rng.choice((rng.randint(1, 100), rng.randint(100, 9000)))
    return Case(
        values={"amount": amount, "from": start, "to": end},
        result={"amount": _number(amount * rng.uniform(0.5, 3)), "currency": end},
        slots={"amount": str(amount), "from": start, "to": end},
    )


def _order(rng: random.Random) -> Case:
    name = rng.choice(("", "A-", "B", "ORD-", "X")) + str(rng.randint(100, 99999))
    status = rng.choice(("shipped", "packed", "delivered", "waiting", "cancelled", "paid"))
    return Case(
        values={"order": name}, result={"status": status, "date": str(_day(rng))}, slots={"order": name}
    )


def _stock(rng: random.Random) -> Case:
    item = rng.choice(ITEMS)
    return Case(values={"item": item}, result={"count": rng.randint(0, 900)}, slots={"item": item})


def _tenant(rng: random.Random) -> str:
    return rng.choice(
        (
            "acme",
            "globex",
            "initech",
            "umbra",
            "lakeside",
            "redwood",
            "bluefin",
            "orchard",
            "demo",
            "north",
            "zeta",
            "blue-7",
        )
    )


def _quota(rng: random.Random) -> Case:
    tenant, limit = _tenant(rng), rng.choice((64, 128, 256, 512, 1024))
    return Case(
        values={"tenant": tenant},
        result={"used_mb": rng.randint(0, limit), "limit_mb": limit},
        slots={"tenant": tenant},
    )


def _trace(rng: random.Random) -> Case:
    trace = f"{rng.getrandbits(32):08x}"
    return Case(
        values={"trace": trace},
        result={"spans": rng.randint(5, 60), "ms": rng.randint(20, 4000)},
        slots={"trace": trace},
    )


def _worker(rng: random.Random) -> Case:
    worker = f"{rng.choice(('w', 'worker-', 'gpu-', 'node'))}{rng.randint(0, 31)}"
    state = rng.choice(("ready", "draining", "busy", "starting"))
    return Case(
        values={"worker": worker},
        result={"state": state, "streams": rng.randint(0, 16)},
        slots={"worker": worker},
    )


def _timer(rng: random.Random) -> Case:
    minutes, label = (
        rng.choice((1, 2, 3, 5, 10, 15, 20, 25, 30, 45, 60, 90)),
        rng.choice(("tea", "lunch", "backup", "meeting", "build", "call", "break", "test")),
    )
    return Case(
        values={"minutes": minutes, "label": label},
        result={"ok": True, "ends": f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"},
        slots={"minutes": str(minutes), "label": label},
    )


def _message(rng: random.Random) -> Case:
    name = rng.choice(NAMES)
    text = rng.choice(
        (
            "the build is green",
            "lunch is ready",
            "the demo starts soon",
            "please call back",
            "the worker is up",
            "the report is done",
            "we meet at noon",
            "the trace looks fine",
            "the quota is full",
            "the test failed",
        )
    )
    return Case(
        values={"to": name, "text": text},
        result={"sent": True, "id": rng.randint(100, 9999)},
        slots={"to": name, "text": text},
    )


def _tests(rng: random.Random) -> Case:
    module = rng.choice(
        (
            "gateway",
            "broker",
            "worker",
            "protocol",
            "engine",
            "kernels",
            "cache",
            "sampling",
            "ledger",
            "router",
            "parser",
        )
    )
    return Case(
        values={"module": module},
        result={"passed": rng.randint(1, 300), "failed": rng.choice((0, 0, 0, 1, 2, 3, 7))},
        slots={"module": module},
    )


def _dice(rng: random.Random) -> Case:
    sides, count = rng.choice((4, 6, 8, 10, 12, 20)), rng.randint(1, 5)
    rolls = [rng.randint(1, sides) for _ in range(count)]
    return Case(
        values={"count": count, "sides": sides},
        result={"rolls": rolls, "total": sum(rolls)},
        slots={"count": str(count), "sides": str(sides)},
    )


def _p(key: str, names: str, type_: str = "string") -> Parameter:
    return Parameter(key=key, names=tuple(names.split()), type=type_)


TOOLS: Final[dict[str, Tool]] = {
    "units": Tool(
        names=("convert_units", "unit_convert", "convert", "units", "convert_unit"),
        about=("Convert a value from one unit to another.", "Converts units of length, mass, volume, time or data.", "Unit conversion."),
        parameters=(_p("value", "value amount number quantity", "number"), _p("from", "from_unit from source_unit unit_from"), _p("to", "to_unit to target_unit unit_to")),
        make=_units, refine=_units_again,
        verbs=("convert {value} {from} to {to}", "turn {value} {from} into {to}", "change {value} {from} to {to}", "convert {value} {from} into {to}", "give me {value} {from} in {to}", "express {value} {from} in {to}", "work out {value} {from} in {to}", "show {value} {from} as {to}"),
        asks=("Convert {value} {from} to {to}.", "How many {to} are {value} {from}?", "What is {value} {from} in {to}?", "Convert {value} {from} to {to}",
              "convert {value} {from} into {to}", "{value} {from} in {to}?", "Please convert {value} {from} to {to}.", "How much is {value} {from} in {to}?",
              "Express {value} {from} in {to}.", "I have {value} {from}. What is that in {to}?", "Tell me {value} {from} in {to}.", "Can you convert {value} {from} to {to}?",
              "Turn {value} {from} into {to}.", "{value} {from} to {to}", "Change {value} {from} to {to}, please.", "I need {value} {from} as {to}."),
        follows=("And {value} {from} to {to}?", "And {value} {from} in {to}?", "What about {value} {from} to {to}?", "Now {value} {from} in {to}."),
        answer="{value} {from} is {result} {unit}."),
    "calculate": Tool(
        names=("calculate", "calculator", "evaluate", "calc", "compute"),
        about=("Evaluate an arithmetic expression.", "Does arithmetic.", "A calculator for + - * and /."),
        parameters=(_p("expression", "expression expr formula input"),),
        make=_expression, refine=_expression_again,
        verbs=("calculate {shown}", "compute {shown}", "work out {shown}", "evaluate {shown}", "solve {shown}", "tell me {shown}", "find {shown}", "do {shown}"),
        asks=("What is {shown}?", "Calculate {shown}.", "How much is {shown}?", "Compute {shown}", "{shown}?", "Please calculate {shown}.", "What's {shown}?",
              "Work out {shown}.", "Can you compute {shown}?", "Tell me {shown}.", "what is {shown}", "Evaluate {shown}.", "I need {shown}.", "Find {shown}.", "{shown} =", "Do the sum: {shown}"),
        follows=("And {tail}?", "And that {tail}?", "Now {tail}.", "Then {tail}?", "and {tail}", "That {tail}?", "Take that {tail}.", "What is that {tail}?"),
        answer="{expr} = {result}."),
    "between": Tool(
        names=("days_between", "date_diff", "count_days", "day_difference"), about=("Number of days between two dates.", "Counts the days from one date to another."),
        parameters=(_p("start", "start start_date from first"), _p("end", "end end_date to second")), make=_between,
        nouns=("the days between {start} and {end}", "the number of days from {start} to {end}", "how many days there are from {start} to {end}", "the days from {start} until {end}", "the difference between {start} and {end} in days"),
        asks=("How many days are there from {start} to {end}?", "How many days between {start} and {end}?", "Count the days from {start} to {end}.", "Days from {start} until {end}?",
              "What is the number of days between {start} and {end}?", "How long is it from {start} to {end} in days?", "days between {start} and {end}", "From {start} to {end}, how many days?"),
        follows=("And from {start} to {end}?", "And between {start} and {end}?", "Now from {start} to {end}.", "What about {start} to {end}?"),
        answer="There are {days} days from {start} to {end}."),
    "shift": Tool(
        names=("add_days", "date_add", "shift_date", "plus_days"), about=("Add days to a date.", "Returns the date some days later."),
        parameters=(_p("date", "date start day start_date"), _p("days", "days count number_of_days n", "integer")), make=_shift,
        nouns=("the date {days} days after {date}", "the day {days} days from {date}", "which date is {days} days after {date}", "{date} plus {days} days", "what date comes {days} days after {date}"),
        asks=("What date is {days} days after {date}?", "Add {days} days to {date}.", "Which date comes {days} days after {date}?", "{date} plus {days} days?",
              "What day is {days} days from {date}?", "Give me the date {days} days after {date}.", "{days} days after {date} is when?", "Move {date} by {days} days."),
        follows=("And {days} days after {date}?", "And {date} plus {days} days?", "Now {days} days after {date}.", "What about {days} days after {date}?"),
        answer="{days} days after {start} is {date}."),
    "weekday": Tool(
        names=("weekday", "day_of_week", "get_weekday", "which_day"), about=("Day of the week of a date.", "Tells the weekday of a date."),
        parameters=(_p("date", "date day when"),), make=_weekday,
        nouns=("the weekday of {date}", "the day of the week of {date}", "which weekday {date} is", "the weekday for {date}", "what day of the week {date} is"),
        asks=("What weekday is {date}?", "Which day of the week is {date}?", "What day is {date}?", "On which weekday does {date} fall?", "Tell me the weekday of {date}.",
              "Is {date} a Monday?", "weekday of {date}?", "{date} is which day?"),
        follows=("And {date}?", "What about {date}?", "And on {date}?", "Now {date}."), answer="{start} is a {weekday}."),
    "weather": Tool(
        names=("get_weather", "weather", "current_weather", "weather_in"), about=("Current weather of a city.", "Tells the weather in a city."),
        parameters=(_p("city", "city location place town"),), make=_weather,
        nouns=("the weather in {city}", "the weather for {city}", "how the weather is in {city}", "the current weather in {city}", "the temperature in {city}", "the weather of {city}"),
        asks=("What is the weather in {city}?", "How is the weather in {city}?", "Weather in {city}?", "Tell me the weather in {city}.", "Is it cold in {city}?", "What's the weather like in {city}?",
              "Check the weather in {city}.", "How warm is it in {city}?", "Please look up the weather for {city}.", "Do I need a coat in {city}?", "weather {city}", "I travel to {city}. How is the weather?"),
        follows=("And in {city}?", "What about {city}?", "And {city}?", "Now {city}."), answer="It is {temperature} degrees and {sky} in {city}."),
    "clock": Tool(
        names=("current_time", "get_time", "time_in", "clock"), about=("Current time in a city.", "Tells what time it is in a city."),
        parameters=(_p("city", "city location place zone"),), make=_clock,
        nouns=("the time in {city}", "the local time in {city}", "what time it is in {city}", "the current time in {city}", "the clock time of {city}"),
        asks=("What time is it in {city}?", "Tell me the time in {city}.", "What is the time in {city}?", "How late is it in {city}?", "time in {city}?", "Current time in {city}?",
              "Do you know the time in {city}?", "Give me the local time of {city}."),
        follows=("And in {city}?", "And {city}?", "What about {city}?", "Now {city}."), answer="It is {time} in {city}."),
    "currency": Tool(
        names=("convert_currency", "exchange", "currency", "fx_convert"), about=("Convert money between currencies.", "Exchanges an amount into another currency."),
        parameters=(_p("amount", "amount value sum", "number"), _p("from", "from from_currency source base"), _p("to", "to to_currency target quote")), make=_currency,
        verbs=("convert {amount} {from} to {to}", "exchange {amount} {from} into {to}", "change {amount} {from} to {to}", "turn {amount} {from} into {to}", "give me {amount} {from} in {to}", "swap {amount} {from} for {to}"),
        asks=("Convert {amount} {from} to {to}.", "How much is {amount} {from} in {to}?", "What are {amount} {from} in {to}?", "Exchange {amount} {from} into {to}.", "{amount} {from} in {to}?",
              "I want to change {amount} {from} to {to}.", "Give me {amount} {from} in {to}.", "What do I get in {to} for {amount} {from}?"),
        follows=("And {amount} {from} in {to}?", "And {amount} {from} to {to}?", "What about {amount} {from} in {to}?", "Now {amount} {from} in {to}."),
        answer="{value} {from} is {amount} {currency}."),
    "order": Tool(
        names=("lookup_order", "order_status", "get_order", "find_order"), about=("Status of an order.", "Looks up an order by its number."),
        parameters=(_p("order", "order_id id order number"),), make=_order,
        nouns=("the status of order {order}", "order {order}", "where order {order} is", "the state of order {order}", "news of order {order}"),
        asks=("Where is order {order}?", "What is the status of order {order}?", "Look up order {order}.", "Has order {order} been shipped?", "Check order {order}, please.", "My order is {order}. Where is it?",
              "Find order {order}.", "Status of {order}?", "Tell me about order {order}.", "When does order {order} arrive?", "order {order}?", "I wait for order {order}."),
        follows=("And order {order}?", "And {order}?", "What about {order}?", "Now order {order}."), answer="Order {order} is {status}, dated {date}."),
    "stock": Tool(
        names=("get_stock", "stock_level", "inventory", "count_items"), about=("How many pieces of an item are in stock.", "Stock level of an item."),
        parameters=(_p("item", "item product name article"),), make=_stock,
        nouns=("the stock of {item}", "how many {item} are left", "the number of {item} in stock", "how many {item} we have", "the count of {item}"),
        asks=("How many {item} do we have?", "How many {item} are in stock?", "Check the stock of {item}.", "Are there {item} left?", "Stock of {item}?", "Do we have {item}?", "Tell me how many {item} are left.", "Count the {item}."),
        follows=("And {item}?", "What about {item}?", "And how many {item}?", "Now {item}."), answer="There are {count} {item} in stock."),
    "quota": Tool(
        names=("get_quota", "tenant_quota", "quota", "quota_of"), about=("Cache quota of a tenant.", "Bytes used and allowed for a tenant."),
        parameters=(_p("tenant", "tenant name tenant_id customer"),), make=_quota,
        nouns=("the quota of {tenant}", "the cache use of {tenant}", "the quota of tenant {tenant}", "how much cache {tenant} uses", "the limit of tenant {tenant}"),
        asks=("What is the quota of {tenant}?", "How much cache does {tenant} use?", "Show the quota of tenant {tenant}.", "How full is the cache of {tenant}?", "Check the quota of {tenant}.", "Quota of {tenant}?",
              "Is tenant {tenant} near its limit?", "How many bytes does {tenant} hold?"),
        follows=("And {tenant}?", "And tenant {tenant}?", "What about {tenant}?", "Now {tenant}."), answer="Tenant {tenant} uses {used_mb} MB of {limit_mb} MB."),
    "trace": Tool(
        names=("get_trace", "trace", "find_trace", "show_trace"), about=("Spans and duration of a trace.", "Looks up a trace by its id."),
        parameters=(_p("trace", "trace_id id trace"),), make=_trace,
        nouns=("trace {trace}", "the trace {trace}", "how long trace {trace} took", "the spans of trace {trace}", "the details of trace {trace}"),
        asks=("Show trace {trace}.", "How long did trace {trace} take?", "Look up trace {trace}.", "What do we know about trace {trace}?", "How many spans has trace {trace}?", "Find trace {trace}.",
              "trace {trace}?", "Check {trace}, please."),
        follows=("And trace {trace}?", "And {trace}?", "What about {trace}?", "Now {trace}."), answer="Trace {trace} has {spans} spans and took {ms} ms."),
    "worker": Tool(
        names=("worker_status", "get_worker", "worker_state", "check_worker"), about=("State of a worker.", "Tells whether a worker is ready and how many streams it runs."),
        parameters=(_p("worker", "worker worker_id name node"),), make=_worker,
        nouns=("the state of {worker}", "the status of {worker}", "how busy {worker} is", "the state of worker {worker}", "the load of {worker}"),
        asks=("Is {worker} ready?", "What is the state of {worker}?", "Check worker {worker}.", "How busy is {worker}?", "How is {worker} doing?", "Status of {worker}?", "Look at {worker}.", "Is worker {worker} up?"),
        follows=("And {worker}?", "What about {worker}?", "And is {worker} up?", "Now {worker}."), answer="Worker {worker} is {state} with {streams} streams."),
    "timer": Tool(
        names=("set_timer", "timer", "start_timer", "remind"), about=("Set a timer.", "Starts a timer with a label."),
        parameters=(_p("minutes", "minutes duration length", "integer"), _p("label", "label name title")), make=_timer,
        verbs=("set a {label} timer for {minutes} minutes", "start a timer of {minutes} minutes for {label}", "remind me of the {label} in {minutes} minutes", "set a timer for {label}, {minutes} minutes", "wake me in {minutes} minutes for {label}"),
        asks=("Set a {label} timer for {minutes} minutes.", "Remind me of the {label} in {minutes} minutes.", "Start a timer of {minutes} minutes for the {label}.", "Timer: {minutes} minutes, {label}.",
              "I need a {minutes} minute timer for {label}.", "Set a timer: {label}, {minutes} minutes.", "{minutes} minutes for {label}, please.", "Wake me for {label} in {minutes} minutes."),
        follows=("And {minutes} minutes for {label}.", "And a {label} timer of {minutes} minutes.", "Also {minutes} minutes for {label}.", "Now {label}, {minutes} minutes."),
        answer="The {label} timer is set and ends at {ends}."),
    "message": Tool(
        names=("send_message", "message", "notify", "send_text"), about=("Send a message to a person.", "Sends a short text to somebody."),
        parameters=(_p("to", "to recipient person user"), _p("text", "text message body content")), make=_message,
        verbs=("tell {to} that {text}", "let {to} know that {text}", "send {to} a message that {text}", "write to {to} that {text}", "inform {to} that {text}"),
        asks=("Tell {to} that {text}.", "Send {to} a message: {text}", "Let {to} know that {text}.", "Write to {to}: {text}", "Message {to} that {text}.", "Please tell {to} that {text}.", "Notify {to}: {text}",
              "Inform {to} that {text}."),
        follows=("And tell {to} that {text}.", "And {to}: {text}", "Also tell {to} that {text}.", "Now tell {to} that {text}."), answer="I told {to} that {text}."),
    "tests": Tool(
        names=("run_tests", "test_module", "run_suite", "check_tests"), about=("Run the tests of a module.", "Runs a test suite and counts failures."),
        parameters=(_p("module", "module name path suite"),), make=_tests,
        verbs=("run the {module} tests", "test the {module}", "run the tests of the {module}", "check the {module} tests", "run the test suite of the {module}"),
        asks=("Run the tests of the {module}.", "Do the {module} tests pass?", "Test the {module}.", "Please run the {module} tests.", "Are the {module} tests green?", "Check the tests of {module}.", "run tests for {module}",
              "How do the {module} tests look?"),
        follows=("And the {module}?", "And {module}?", "What about the {module}?", "Now the {module}."), answer="The {module} tests: {passed} passed, {failed} failed."),
    "dice": Tool(
        names=("roll_dice", "dice", "roll", "throw_dice"), about=("Roll dice.", "Throws dice and adds them up."),
        parameters=(_p("count", "count number dice n", "integer"), _p("sides", "sides faces size", "integer")), make=_dice,
        verbs=("roll {count} dice with {sides} sides", "throw {count} dice of {sides} sides", "roll {count}d{sides}", "roll {count} {sides}-sided dice", "throw {count}d{sides}"),
        asks=("Roll {count} dice with {sides} sides.", "Throw {count} dice of {sides} sides.", "Roll {count}d{sides}.", "Please roll {count} {sides}-sided dice.", "{count} dice, {sides} sides.", "Give me a roll of {count}d{sides}.",
              "Roll the dice: {count} of {sides} sides.", "Use {count} dice with {sides} faces."),
        follows=("And {count} with {sides} sides?", "And {count}d{sides}?", "Again, {count} dice with {sides} sides.", "Now {count}d{sides}."), answer="The rolls are {rolls}, in total {total}."),
}  # fmt: skip
