"""Wording that is not about one tool or topic: system prompts, greetings, small skills; and the train/held-out split.

Every list of wordings splits by index: one wording in four is for evaluation only (`HELD`), so that the figures on
held-out templates are about wordings that training never saw.
"""

from __future__ import annotations

import random
from typing import Final

TRAIN: Final = "train"
HELD: Final = "held"


def choose(rng: random.Random, wordings: tuple[str, ...], split: str) -> str:
    """One wording of `split`. Lists shorter than four have no held-out part and serve both."""
    if len(wordings) < 4:
        return rng.choice(wordings)
    part = [w for i, w in enumerate(wordings) if (i % 4 == 3) == (split == HELD)]
    return rng.choice(part)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES: Final = _words(
    "Ada Ben Chloe Dana Emil Farah Gus Hana Ivan Jana Kofi Lena Mara Nils Olga Pavel Quinn Rosa Sam Tara Uma Viktor Wen "
    "Xenia Yara Zoe Alice Bob Carol Dave Erin Frank Grace Heidi Igor Judy Karl Laura Mike Nina Oscar Peggy Ruth Steve "
    "Tom Ursula Vera Walter Priya Kenji Mei Omar Leila Diego Sofia Anton"
)
CITIES: Final = _words(
    "Paris London Berlin Madrid Rome Vienna Prague Oslo Stockholm Helsinki Dublin Lisbon Athens Warsaw Budapest Zurich "
    "Geneva Brussels Amsterdam Copenhagen Tokyo Osaka Kyoto Seoul Beijing Shanghai Delhi Mumbai Sydney Melbourne Toronto "
    "Montreal Boston Chicago Denver Seattle Austin Lima Bogota Nairobi Cairo Lagos Accra Dakar Tunis Quito Havana"
)
ITEMS: Final = _words(
    "apples pears lamps chairs desks cables pens notebooks mugs screws bolts filters pumps fans switches sensors "
    "batteries panels boxes labels gloves helmets tents ropes maps clocks radios bulbs hoses valves"
)
COMPANIES: Final = _words(
    "Acme Globex Initech Umbra Northwind Contoso Fabrikam Lakeside Redwood Bluefin Orchard Summit"
)

ROLES: Final = (
    "You are a helpful assistant.",
    "You are the Burstline assistant.",
    "You are a helpful assistant for Burstline.",
    "You are a concise assistant.",
    "You are an agent that answers questions and uses tools.",
    "You are the support agent of {company}.",
    "You are an assistant for engineers.",
    "You are the operations assistant of {company}, and you know Burstline well.",
    "You help people who run Burstline.",
    "You answer questions about Burstline and you may use tools.",
    "You are {name}'s assistant.",
    "You are a careful assistant that never invents numbers.",
    "You are the Burstline demo assistant.",
    "You are a friendly agent.",
    "Act as the on-call helper of the platform team.",
    "You are a technical assistant for the team that operates Burstline.",
)
RULES: Final = (
    "Keep answers short.",
    "Answer in one or two sentences.",
    "Use plain words.",
    "Do not guess numbers; use a tool when one fits.",
    "When a tool gives a result, quote it exactly.",
    "If no tool fits, say so.",
    "Never reveal keys or tokens.",
    "Answer in English.",
    "Do not repeat the question.",
    "Use metric units unless the user asks for others.",
    "Dates are written as year, month and day.",
    "Call one tool at a time.",
    "Wait for the result of a tool before you answer.",
    "Be polite and direct.",
    "If the user greets you, greet them back.",
    "Do not use tables.",
    "If a tool reports an error, tell the user what it said.",
    "Explain a technical word when it first appears.",
    "Prefer facts from the documentation.",
    "Users are engineers who know queues and databases.",
    "Burstline has a gateway, workers and a cache broker.",
    "The gateway turns text into tokens and puts requests on a durable queue.",
    "Workers run the model in bursts and stream the tokens back.",
    "The cache broker keeps entries, leases, tenants and quotas in Postgres.",
    "A request has one exact token stream, whatever the cache or the drafter did.",
    "Tenants are kept apart: no lookup ever crosses from one to another.",
    "Captures are taken on a grid of 64 tokens, so that later turns can reuse them.",
    "A trace follows each request from the first byte to the last query.",
    "The user's time is precious, so come to the point.",
    "If you are unsure, say that you do not know.",
    "Money amounts are rounded to two digits.",
    "Office hours are from nine to five on working days.",
    "Escalate to a person when the user asks for one.",
    "Everything that you say may be logged for quality.",
    "Do not promise delivery dates that a tool did not confirm.",
    "The service desk is reached by the internal phone book.",
    "Remember what the user told you earlier in the conversation.",
    "Follow-up questions refer to the last topic.",
    "Lists are written with one item in a line.",
    "This conversation is part of a demonstration on a small machine.",
)
GREETINGS: Final = ("Hello!", "Hi", "Hi there!", "Good morning.", "Hey", "hello", "Good evening!", "Hi, how are you?",
                    "Hello there", "Hey, are you there?", "Good day.", "Hi!")  # fmt: skip
GREETING_ANSWER: Final = "Hello! How can I help you?"
THANKS: Final = (
    "Thanks!",
    "Thank you.",
    "Great, thanks.",
    "Thanks a lot!",
    "Perfect, thank you.",
    "Cool, thanks",
    "thx",
    "Many thanks.",
)
THANKS_ANSWER: Final = "You are welcome."
BYES: Final = (
    "Bye",
    "Goodbye!",
    "See you.",
    "That's all.",
    "That was all, bye.",
    "I am done.",
    "Bye bye",
    "See you later!",
)
BYE_ANSWER: Final = "Goodbye!"
WHO: Final = ("Who are you?", "What are you?", "Tell me who you are.", "Are you a person?", "What is your name?",
              "Introduce yourself.", "Who am I talking to?", "Are you a bot?")  # fmt: skip
WHO_ANSWER: Final = "I am the pocket model, a small assistant that ships with Burstline."
ABLE: Final = ("What can you do?", "How can you help me?", "What are you able to do?", "What do you offer?",
               "Can you help me?", "What should I ask you?", "What are your skills?", "Help")  # fmt: skip
ABLE_ANSWER: Final = "I answer short questions about Burstline and I can call the tools that I am given."
UNKNOWN: Final = (
    "Who won the game last night?", "Write me a long novel.", "What is the meaning of life?", "Who is the president?",
    "What do you think about politics?", "Tell me a joke.", "Which stock should I buy?", "Who painted that picture?",
    "Can you play chess?", "Recommend a film.", "What is the best phone?", "How do I cook rice?",
    "What will happen tomorrow?", "Sing a song.", "Who invented the wheel?", "Is there life on Mars?",
)  # fmt: skip
UNKNOWN_ANSWER: Final = "I do not know that. I can help with Burstline and with my tools."
NO_TOOL_ANSWER: Final = "I have no tool for that here."
NAME_SAYS: Final = ("My name is {name}.", "I am {name}.", "Hi, I'm {name}.", "This is {name} speaking.", "Call me {name}.",
                    "Hello, my name is {name}.", "{name} here.", "You can call me {name}.")  # fmt: skip
NAME_ASKS: Final = ("What is my name?", "Do you remember my name?", "Who am I?", "What did I say my name was?",
                    "Say my name.", "Do you know my name?", "What am I called?", "Can you recall my name?")  # fmt: skip
COUNT_ASKS: Final = ("Count from {a} to {b}.", "Please count from {a} to {b}", "List the numbers from {a} to {b}.",
                     "Write all numbers from {a} up to {b}.", "count {a} to {b}", "Give me the numbers {a} to {b}.",
                     "Can you count from {a} to {b}?", "Numbers from {a} to {b}, please.")  # fmt: skip
REPEAT_ASKS: Final = ("Repeat after me: {text}", "Say this: {text}", "Please repeat: {text}", "Echo this back: {text}",
                      "Write exactly this: {text}", "Copy this text: {text}", "Say exactly: {text}", "Repeat this: {text}")  # fmt: skip
JSON_ASKS: Final = (
    "Give me a JSON object with {fields}.", "Write JSON with {fields}.", "Return a JSON object with {fields}.",
    "As JSON: {fields}.", "Make a JSON object with {fields}", "Answer in JSON with {fields}.",
    "I need a JSON object holding {fields}.", "Produce JSON with {fields}.",
)  # fmt: skip
LEADS: Final = (
    "",
    "",
    "",
    "",
    "Please: ",
    "Quick one: ",
    "Next question. ",
    "OK. ",
    "Thanks. ",
    "Good. ",
    "Hm. ",
    "One more: ",
)


def system_prompt(rng: random.Random, split: str) -> str:
    """A role and zero to fourteen rules: about 8 to 300 tokens."""
    parts = [choose(rng, ROLES, split)]
    count = rng.choice((0, 1, 2, 2, 3, 3, 4, 5, 6, 8, 10, 12, 14))
    held = [rule for i, rule in enumerate(RULES) if i % 4 == 3]
    pool = list(RULES) if split == HELD else [rule for rule in RULES if rule not in held]
    parts += rng.sample(pool, min(count, len(pool)))
    return " ".join(parts).format(company=rng.choice(COMPANIES), name=rng.choice(NAMES))
