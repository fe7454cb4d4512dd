"""Composes seeded agent dialogues from topics, tools and small skills, and renders them with the model's template.

A dialogue is a list of chat messages plus its tools. `split` chooses between the wordings that training may see and the
held-out ones. Training text is the template's own output, so what the model reads when serving is what it learnt from.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.pocket.recipe import facts, phrases, wordings
from models.pocket.recipe.tools import TOOLS, Case, JsonObject, Tool

Message = dict[str, Any]
FOLDER = Path(__file__).parent.parent


@dataclass
class Dialogue:
    """Messages in chat form and the schemas offered; `kinds` names what each assistant answer is an example of."""

    messages: list[Message] = field(default_factory=list)
    schemas: list[JsonObject] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)

    def say(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A tool as this dialogue's schema spells it."""

    key: str
    tool: Tool
    name: str
    spelling: dict[str, str]

    def schema(self, rng: random.Random) -> JsonObject:
        properties = {self.spelling[p.key]: {"type": p.type} for p in self.tool.parameters}
        body = {
            "name": self.name,
            "description": rng.choice(self.tool.about),
            "parameters": {"type": "object", "properties": properties, "required": list(properties)},
        }
        if rng.random() < 0.5:
            for p in self.tool.parameters:
                properties[self.spelling[p.key]]["description"] = f"The {p.names[0].replace('_', ' ')}."
        return {"type": "function", "function": body}

    def arguments(self, case: Case) -> str:
        return json.dumps({self.spelling[key]: value for key, value in case.values.items()})


def offer(rng: random.Random, key: str) -> Offer:
    """Draws a name and the parameter spellings; the first spelling of all is the likeliest."""
    tool = TOOLS[key]
    plain = rng.random() < 0.5
    spelling = {p.key: p.names[0] if plain else rng.choice(p.names) for p in tool.parameters}
    return Offer(
        key=key, tool=tool, name=tool.names[0] if plain else rng.choice(tool.names), spelling=spelling
    )


def reply(tool: Tool, case: Case) -> str:
    """The final answer, which quotes the result; `start` and `value` stay the user's own, result keys win otherwise."""
    slots: dict[str, Any] = dict(case.slots)
    for original, kept in (("date", "start"), ("amount", "value")):
        if original in case.slots:
            slots.setdefault(kept, case.slots[original])
    slots.update({k: ", ".join(map(str, v)) if isinstance(v, list) else v for k, v in case.result.items()})
    return tool.answer.format(**slots)


class Composer:
    """Builds one dialogue; every draw comes from `rng`, so a seed is a dialogue."""

    def __init__(self, rng: random.Random, split: str) -> None:
        self.rng = rng
        self.split = split
        self.dialogue = Dialogue()
        self.offers: dict[str, Offer] = {}
        self.last_topic = False
        self.last_case: tuple[str, Case] | None = None
        self.name: str | None = None

    def choose(self, wordings: tuple[str, ...]) -> str:
        wording = phrases.choose(self.rng, wordings, self.split)
        return phrases.noisy(self.rng, wording) if self.split == phrases.TRAIN else wording

    def order(self, verbs: tuple[str, ...], forms: tuple[str, ...] = wordings.VERB_FORMS) -> str:
        """An action in one of the general forms, still with its slots. Both parts come from this split."""
        text = self.choose(forms).replace("{vp}", phrases.choose(self.rng, verbs, self.split))
        return text[0].upper() + text[1:] if self.rng.random() < 0.8 else text

    def ask(self, tool: Tool) -> str:
        """A wording of `tool`'s own, or a general form around its noun or verb, still with its slots."""
        general = self.rng.random() < 0.5
        if general and tool.verbs:
            return self.order(tool.verbs)
        if general and tool.nouns:
            return self.choose(wordings.NOUN_FORMS).replace(
                "{np}", phrases.choose(self.rng, tool.nouns, self.split)
            )
        return self.choose(tool.asks)

    def lead(self, text: str) -> str:
        """The question as a person might type it: now and then with a lead-in or a tail, without the last mark."""
        if self.rng.random() < 0.1:
            text = text.rstrip("?.")
        first = len(self.dialogue.messages) <= 2
        lead = "" if first and self.rng.random() < 0.5 else self.rng.choice(wordings.LEADS)
        if lead.endswith((", ", ": ")) and self.rng.random() < 0.5:
            text = text[0].lower() + text[1:]
        return lead + text + self.rng.choice(wordings.TAILS)

    def exchange(self, kind: str, question: str, answer: str) -> None:
        self.dialogue.say("user", question)
        self.dialogue.say("assistant", answer)
        self.dialogue.kinds.append(kind)

    def fact(self) -> None:
        names, answer = facts.TOPICS[self.rng.choice(list(facts.TOPICS))]
        follow = self.last_topic and self.rng.random() < 0.5
        wording = self.choose(facts.FOLLOW) if follow else self.lead(self.choose(facts.WHAT))
        name = self.rng.choice(names)
        if self.rng.random() < 0.1:
            name = name.removeprefix("the ").removeprefix("a ")
        asked = wording.format(x=name)
        self.exchange("fact", asked.lower() if self.rng.random() < 0.08 else asked, answer)
        self.last_topic = True

    def howto(self) -> None:
        verbs, answer = self.rng.choice(facts.HOWTO)
        self.exchange("howto", self.lead(self.order(verbs, wordings.HOW_FORMS)), answer)
        self.last_topic = False

    def question(self) -> None:
        at = self.rng.randrange(len(facts.CLAUSES))
        clauses, answer = facts.CLAUSES[at]
        if self.rng.random() < 0.5:
            wording = self.choose(facts.STRAIGHT[at])
        else:
            wording = self.choose(wordings.CLAUSE_FORMS).replace(
                "{clause}", phrases.choose(self.rng, clauses, self.split)
            )
        self.exchange("question", self.lead(wording), answer)
        self.last_topic = False

    def small_talk(self) -> None:
        openings, answer = self.rng.choice((
            (wordings.GREETINGS, wordings.GREETING_ANSWER), (wordings.THANKS, wordings.THANKS_ANSWER),
            (wordings.WHO, wordings.WHO_ANSWER), (wordings.ABLE, wordings.ABLE_ANSWER), (wordings.UNKNOWN, wordings.UNKNOWN_ANSWER),
        ))  # fmt: skip
        self.exchange("talk", self.choose(openings), answer)
        self.last_topic = False

    def memory(self) -> None:
        if self.name is None:
            self.name = self.rng.choice(wordings.NAMES)
            self.exchange(
                "memory",
                self.choose(wordings.NAME_SAYS).format(name=self.name),
                f"Hello {self.name}! How can I help you?",
            )
        else:
            self.exchange("memory", self.choose(wordings.NAME_ASKS), f"Your name is {self.name}.")
        self.last_topic = False

    def count(self) -> None:
        start = self.rng.choice((1, 1, self.rng.randint(0, 90)))
        stop = start + self.rng.randint(4, 24)
        question = self.order(wordings.COUNT_VERBS).format(a=start, b=stop)
        self.exchange("count", question, ", ".join(map(str, range(start, stop + 1))) + ".")
        self.last_topic = False

    def repeat(self) -> None:
        """A string of words, of numbers, or a sentence: whatever stands there is to be copied."""
        pools = (
            wordings.ITEMS,
            wordings.NAMES,
            wordings.CITIES,
            tuple(" ".join(wordings.RULES).lower().replace(".", "").split()),
        )
        words = [
            self.rng.choice((*self.rng.choice(pools), str(self.rng.randint(0, 9999))))
            for _ in range(self.rng.randint(2, 8))
        ]
        sentence = self.rng.choice(
            (facts.TOPICS[self.rng.choice(list(facts.TOPICS))][1], self.rng.choice(wordings.RULES))
        )
        text = " ".join(words) if self.rng.random() < 0.7 else sentence
        lead = self.rng.choice(("", "", "Please ", "Now ", "Can you "))
        self.exchange(
            "repeat",
            lead + phrases.choose(self.rng, wordings.REPEAT_VERBS, self.split).format(text=text),
            text,
        )
        self.last_topic = False

    def json_object(self) -> None:
        pool = {"name": self.rng.choice(wordings.NAMES), "city": self.rng.choice(wordings.CITIES), "age": self.rng.randint(18, 90),
                "item": self.rng.choice(wordings.ITEMS), "count": self.rng.randint(1, 500), "ready": self.rng.random() < 0.5}  # fmt: skip
        chosen = {key: pool[key] for key in self.rng.sample(list(pool), self.rng.randint(2, 4))}
        said = [f"{key} {json.dumps(value).strip(chr(34))}" for key, value in chosen.items()]
        fields = ", ".join(said[:-1]) + " and " + said[-1]
        self.exchange("json", self.order(wordings.JSON_VERBS).format(fields=fields), json.dumps(chosen))
        self.last_topic = False

    def _next_case(self, key: str) -> tuple[str, Case, bool]:
        tool = TOOLS[key]
        follow = self.last_case is not None and self.last_case[0] == key and self.rng.random() < 0.7
        if follow and self.last_case is not None:
            case = tool.refine(self.rng, self.last_case[1]) if tool.refine else tool.make(self.rng)
            return self.choose(tool.follows).format(**case.slots), case, True
        case = tool.make(self.rng)
        return self.ask(tool).format(**case.slots), case, False

    def _call(self, made: Offer, case: Case) -> Case:
        """The call, the tool's answer; one result in 25 is an error. Returns the case with what the tool said."""
        function = {"name": made.name, "arguments": made.arguments(case)}
        call = {"id": f"call_{len(self.dialogue.messages)}", "type": "function", "function": function}
        self.dialogue.messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        self.dialogue.kinds.append("call")
        result = case.result
        if self.rng.random() < 0.04:
            result = {
                "error": self.rng.choice(
                    (
                        "not found",
                        "timeout",
                        "no permission",
                        "bad argument",
                        "service down",
                        "too many requests",
                    )
                )
            }
        compact = self.rng.random() < 0.3
        text = json.dumps(result, separators=(",", ":") if compact else (", ", ": "))
        self.dialogue.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        return Case(values=case.values, result=result, slots=case.slots)

    def _conclude(self, pairs: list[tuple[Tool, Case]]) -> None:
        said = [
            f"The tool reports an error: {c.result['error']}." if "error" in c.result else reply(t, c)
            for t, c in pairs
        ]
        self.dialogue.say("assistant", " ".join(said))
        self.dialogue.kinds.append("answer")

    def use_tool(self) -> None:
        keys = list(self.offers)
        stay = self.last_case is not None and self.rng.random() < 0.5
        key = self.last_case[0] if stay and self.last_case else self.rng.choice(keys)
        question, case, follow = self._next_case(key)
        questions, cases = [question], [(key, case)]
        if not follow and self.rng.random() < 0.1:
            other = self.rng.choice(keys)
            more = TOOLS[other].make(self.rng)
            questions.append(self.ask(TOOLS[other]).format(**more.slots))
            cases.append((other, more))
        self.dialogue.say("user", " ".join(questions) if follow else self.lead(" ".join(questions)))
        done = [(TOOLS[k], self._call(self.offers[k], c)) for k, c in cases]
        self._conclude(done)
        tail_key, tail = cases[-1][0], done[-1][1]
        self.last_case = None if "error" in tail.result else (tail_key, tail)
        self.last_topic = False

    def missing_tool(self) -> None:
        key = self.rng.choice([k for k in TOOLS if k not in self.offers])
        case = TOOLS[key].make(self.rng)
        self.exchange("refuse", self.ask(TOOLS[key]).format(**case.slots), wordings.NO_TOOL_ANSWER)
        self.last_topic = False

    def turn(self) -> None:
        if self.offers and self.rng.random() < 0.62:
            self.use_tool()
            return
        steps = (
            self.fact,
            self.howto,
            self.question,
            self.small_talk,
            self.memory,
            self.count,
            self.repeat,
            self.json_object,
            self.missing_tool,
        )
        self.rng.choices(steps, weights=(36, 14, 16, 14, 12, 6, 8, 5, 3))[0]()
        self.last_case = None

    def compose(self, prose: str | None) -> Dialogue:
        """System prompt (most of the time), one to six turns; `prose` is foreign text to put into the system prompt."""
        if self.rng.random() < 0.92:
            text = phrases.system_prompt(self.rng, self.split)
            if prose is not None:
                text = f"{text}\n\n{prose}"
            self.dialogue.say("system", text)
        if self.rng.random() < 0.65:
            keys = self.rng.sample(list(TOOLS), self.rng.choice((1, 1, 2, 2, 3, 3, 4, 5, 6)))
            self.offers = {key: offer(self.rng, key) for key in keys}
            self.dialogue.schemas = [made.schema(self.rng) for made in self.offers.values()]
        for _ in range(self.rng.choice((1, 2, 3, 3, 4, 4, 5, 6))):
            self.turn()
        if self.rng.random() < 0.08:
            self.exchange("talk", self.choose(wordings.BYES), wordings.BYE_ANSWER)
        return self.dialogue


def compose(seed: int, split: str, prose: tuple[str, ...] = ()) -> Dialogue:
    """Dialogue number `seed` of `split`; one in six carries a passage of `prose` in its system prompt."""
    rng = random.Random(f"{split}/{seed}")
    passage = rng.choice(prose) if prose and rng.random() < 0.17 else None
    return Composer(rng, split).compose(passage)


class Renderer:
    """The model's chat template under sandboxed jinja2. `plain_json` renders schemas as bare jinja2 would (sorted keys,
    HTML-safe escapes); otherwise as `json.dumps`, the way of transformers.
    """

    def __init__(self) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = self._raise
        source = (FOLDER / "chat_template.jinja").read_text()
        self._plain = environment.from_string(source)
        as_given = environment.overlay()
        as_given.filters = {
            **environment.filters,
            "tojson": lambda value: json.dumps(value, ensure_ascii=False),
        }
        self._as_given = as_given.from_string(source)

    @staticmethod
    def _raise(message: str) -> None:
        raise ValueError(message)

    def render(
        self,
        messages: list[Message],
        tools: list[JsonObject],
        *,
        header: bool = False,
        plain_json: bool = False,
    ) -> str:
        template = self._plain if plain_json else self._as_given
        return template.render(messages=messages, tools=tools or None, add_generation_prompt=header)
