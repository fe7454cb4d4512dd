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
GREETINGS: Final = (
    "Hello!",
    "Hi",
    "Hi there!",
    "Good morning.",
    "Hey",
    "hello",
    "Good evening!",
    "Hi, how are you?",
    "Hello there",
    "hi!",
    "Hey, are you there?",
    "Good day.",
    "Hi!",
    "Hello",
    "hey there",
    "Good afternoon.",
    "Hello again.",
    "Greetings!",
    "How are you?",
    "Hi assistant",
    "Hello, nice to meet you.",
    "Howdy",
    "Morning!",
    "Hello, is anybody there?",
)
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
    "Thank you very much.",
    "Thanks for that.",
    "thanks",
    "Good, thank you!",
    "Nice, thanks.",
    "That helps, thank you.",
    "Thanks so much.",
    "Very kind, thanks.",
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
    "bye!",
    "Goodbye, and thanks.",
    "I have to go.",
    "Until next time.",
    "We are done.",
    "That is everything.",
    "ciao",
    "Good night.",
)
BYE_ANSWER: Final = "Goodbye!"
WHO: Final = (
    "Who are you?",
    "What are you?",
    "Tell me who you are.",
    "Are you a person?",
    "What is your name?",
    "Introduce yourself.",
    "Who am I talking to?",
    "Are you a bot?",
    "What model are you?",
    "who are you",
    "Are you human?",
    "Say who you are.",
    "Which assistant are you?",
    "Tell me about yourself.",
    "What is this assistant?",
    "Do you have a name?",
    "Are you an AI?",
    "Whom do I speak with?",
    "What kind of model are you?",
    "Your name?",
)
WHO_ANSWER: Final = "I am the pocket model, a small assistant that ships with Burstline."
ABLE: Final = (
    "What can you do?",
    "How can you help me?",
    "What are you able to do?",
    "What do you offer?",
    "Can you help me?",
    "What should I ask you?",
    "What are your skills?",
    "Help",
    "How can you help?",
    "what can you do",
    "What are you good at?",
    "I need help.",
    "What can I ask?",
    "Tell me what you can do.",
    "What do you know?",
    "What is your job?",
    "help me",
    "How do you help people?",
    "What may I ask you?",
    "Show me what you can do.",
)
ABLE_ANSWER: Final = "I answer short questions about Burstline and I can call the tools that I am given."
UNKNOWN: Final = (
    "Who won the game last night?",
    "Write me a long novel.",
    "What is the meaning of life?",
    "Who is the president?",
    "What do you think about politics?",
    "Tell me a joke.",
    "Which stock should I buy?",
    "Who painted that picture?",
    "Can you play chess?",
    "Recommend a film.",
    "What is the best phone?",
    "How do I cook rice?",
    "What will happen tomorrow?",
    "Sing a song.",
    "Who invented the wheel?",
    "Is there life on Mars?",
    "Who wrote that book?",
    "How tall is the tower?",
    "Write a poem.",
    "What should I wear?",
    "Who is your favourite singer?",
    "Explain quantum physics.",
    "What is the capital of that country?",
    "How old is the universe?",
)
UNKNOWN_ANSWER: Final = "I do not know that. I can help with Burstline and with my tools."
NO_TOOL_ANSWER: Final = "I have no tool for that here."
NAME_SAYS: Final = (
    "My name is {name}.",
    "I am {name}.",
    "Hi, I'm {name}.",
    "This is {name} speaking.",
    "Call me {name}.",
    "Hello, my name is {name}.",
    "{name} here.",
    "You can call me {name}.",
    "I'm {name}.",
    "Hello, I am {name}.",
    "Hey, {name} here.",
    "My name's {name}.",
    "Please call me {name}.",
    "It's {name}.",
    "Hi, this is {name}.",
    "People call me {name}.",
    "The name is {name}.",
    "Good morning, I am {name}.",
    "I am called {name}.",
    "Hi! {name} is my name.",
)
NAME_ASKS: Final = (
    "What is my name?",
    "Do you remember my name?",
    "Who am I?",
    "What did I say my name was?",
    "Say my name.",
    "Do you know my name?",
    "What am I called?",
    "Can you recall my name?",
    "And what is my name?",
    "Tell me my name.",
    "What's my name?",
    "Which name did I give you?",
    "My name is what?",
    "What name did I tell you?",
    "Remember my name?",
    "Could you repeat my name?",
    "What was my name again?",
    "what is my name",
    "Please say my name.",
    "How am I called?",
)
COUNT_VERBS: Final = (
    "count from {a} to {b}",
    "list the numbers from {a} to {b}",
    "write all numbers from {a} up to {b}",
    "count {a} to {b}",
    "give me the numbers {a} to {b}",
    "write the numbers between {a} and {b}",
    "count up from {a} to {b}",
    "say the numbers from {a} to {b}",
    "print {a} to {b}",
    "start at {a} and count to {b}",
    "list {a} to {b}",
    "write {a} through {b}",
    "count upwards from {a} until {b}",
    "name all numbers from {a} to {b}",
    "go from {a} to {b}",
    "show the numbers {a} to {b}",
)
REPEAT_VERBS: Final = (
    "repeat after me: {text}",
    "say this: {text}",
    "repeat: {text}",
    "echo this back: {text}",
    "write exactly this: {text}",
    "copy this text: {text}",
    "say exactly: {text}",
    "repeat this: {text}",
    "echo: {text}",
    "write this down: {text}",
    "say the following: {text}",
    "repeat the following: {text}",
    "type this: {text}",
    "copy: {text}",
    "print this: {text}",
    "give this back to me: {text}",
)
JSON_VERBS: Final = (
    "give me a JSON object with {fields}",
    "write JSON with {fields}",
    "return a JSON object with {fields}",
    "make a JSON object with {fields}",
    "answer in JSON with {fields}",
    "produce JSON with {fields}",
    "build a JSON object: {fields}",
    "put this into JSON: {fields}",
    "create JSON for {fields}",
    "write {fields} as JSON",
    "format as JSON: {fields}",
    "show {fields} as a JSON object",
    "turn this into JSON: {fields}",
    "print JSON with {fields}",
    "encode {fields} as JSON",
    "send back JSON holding {fields}",
)

# General ways to ask for a thing ({np}), to order an action ({vp}), to wrap an indirect question ({clause}).
NOUN_FORMS: Final = (
    "What is {np}?",
    "Tell me {np}.",
    "Give me {np}.",
    "Show me {np}.",
    "Look up {np}.",
    "I need {np}.",
    "Find {np}.",
    "Can you get {np}?",
    "Do you know {np}?",
    "Check {np}.",
    "{np}?",
    "I want to know {np}.",
    "Please check {np}.",
    "Could you look up {np}?",
    "What's {np}?",
    "Get {np}.",
    "Please tell me {np}.",
    "I am looking for {np}.",
    "And {np}?",
    "Can you tell me {np}?",
    "What about {np}?",
    "Say {np}.",
    "Please find {np}.",
    "I would like {np}.",
    "{np}",
    "Fetch {np}.",
    "Could you find {np}?",
    "Let me know {np}.",
    "Can I have {np}?",
    "Please give me {np}.",
    "I have to know {np}.",
    "Now {np}.",
)
VERB_FORMS: Final = (
    "{vp}.",
    "Please {vp}.",
    "Can you {vp}?",
    "Could you {vp}?",
    "I want you to {vp}.",
    "Would you {vp}?",
    "{vp}",
    "Go ahead and {vp}.",
    "Now {vp}.",
    "You should {vp}.",
    "Kindly {vp}.",
    "I need you to {vp}.",
    "{vp}, please.",
    "Can you please {vp}?",
    "Next, {vp}.",
    "Will you {vp}?",
    "Let us {vp}.",
    "Then {vp}.",
    "Please {vp} for me.",
    "Try to {vp}.",
    "I'd like you to {vp}.",
    "Do this: {vp}.",
    "Just {vp}.",
    "Time to {vp}.",
)
HOW_FORMS: Final = (
    "How do I {vp}?",
    "How can I {vp}?",
    "What command do I need to {vp}?",
    "I want to {vp}. How?",
    "Show me how to {vp}.",
    "How to {vp}?",
    "Which command lets me {vp}?",
    "Is there a way to {vp}?",
    "How does one {vp}?",
    "Tell me how to {vp}.",
    "What must I type to {vp}?",
    "How would I {vp}?",
    "I would like to {vp}.",
    "What do I run to {vp}?",
    "Explain how to {vp}.",
    "Can I {vp}?",
    "What is the command to {vp}?",
    "how do i {vp}",
    "Help me {vp}.",
    "How might we {vp}?",
    "Where do I {vp}?",
    "What does it take to {vp}?",
    "Please show how to {vp}.",
    "Steps to {vp}?",
)
CLAUSE_FORMS: Final = (
    "Tell me {clause}.",
    "Can you say {clause}?",
    "I wonder {clause}.",
    "Do you know {clause}?",
    "Explain {clause}.",
    "I want to know {clause}.",
    "Could you explain {clause}?",
    "Please say {clause}.",
    "{clause}?",
    "Say {clause}.",
    "Can you tell me {clause}?",
    "I do not know {clause}.",
    "Describe {clause}.",
    "Please explain {clause}.",
    "I would like to know {clause}.",
    "Let me know {clause}.",
)
LEADS: Final = (
    "",
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
    "So, ",
    "Great. ",
    "I see. ",
    "Another question: ",
    "Well, ",
    "Nice. ",
    "Fine. ",
    "Right. ",
    "Hey, ",
    "Sorry, ",
    "My question: ",
    "Just a question: ",
    "All right. ",
    "Now, ",
    "Sure. ",
    "Cool. ",
    "By the way, ",
)
TAILS: Final = (
    "",
    "",
    "",
    "",
    "",
    "",
    "",
    "",
    " Thanks.",
    " Please be brief.",
    " Thank you!",
    " I need it now.",
    " Keep it short.",
    " Please.",
)
FILLERS: Final = (
    "please",
    "just",
    "now",
    "quickly",
    "so",
    "well",
    "again",
    "also",
    "maybe",
    "kindly",
    "then",
    "really",
)
_SMALL: Final = frozenset(
    _words("the a an is are do does of to in me you please can could for and it i we have has tell")
)


def noisy(rng: random.Random, wording: str) -> str:
    """The wording as different people would type it: small words dropped, a filler added, a letter swapped, case lost.
    Slots in braces are never touched. Keeps the model from learning wordings by heart.
    """
    words = wording.split(" ")
    if rng.random() < 0.25:
        kept = [w for w in words if w.lower().strip("?.,") not in _SMALL or rng.random() < 0.6]
        words = kept if len(kept) > 1 or (kept and "{" in kept[0]) else words
    if rng.random() < 0.12:
        words.insert(rng.randint(0, len(words)), rng.choice(FILLERS))
    if rng.random() < 0.06:
        at = rng.randrange(len(words))
        if "{" not in words[at] and len(words[at]) > 4:
            cut = rng.randint(1, len(words[at]) - 3)
            word = words[at]
            words[at] = word[:cut] + word[cut + 1] + word[cut] + word[cut + 2 :]
    text = " ".join(words)
    return text.lower() if "{" not in text and rng.random() < 0.1 else text


def system_prompt(rng: random.Random, split: str) -> str:
    """A role and zero to fourteen rules: about 8 to 300 tokens."""
    parts = [choose(rng, ROLES, split)]
    count = rng.choice((0, 1, 2, 2, 3, 3, 4, 5, 6, 8, 10, 12, 14))
    held = [rule for i, rule in enumerate(RULES) if i % 4 == 3]
    pool = list(RULES) if split == HELD else [rule for rule in RULES if rule not in held]
    parts += rng.sample(pool, min(count, len(pool)))
    return " ".join(parts).format(company=rng.choice(COMPANIES), name=rng.choice(NAMES))
