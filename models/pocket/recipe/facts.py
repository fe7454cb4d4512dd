"""What the pocket model knows about Burstline: one short answer a topic, and the ways to ask for it.

Every answer is a fixed string, so that a model of this size can learn it by heart and a draft head can guess it.
"""

from __future__ import annotations

from typing import Final

# topic -> (names it goes by, answer)
TOPICS: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "burstline": (
        ("Burstline", "the Burstline project", "this system"),
        "Burstline serves language models to agents from a durable queue. One request has one exact token stream.",
    ),
    "gateway": (
        ("the gateway", "the API gateway", "the gateway service"),
        "The gateway speaks HTTP. It checks the key, renders the chat template, turns text into tokens, and puts the "
        "request on the queue. Then it streams the answer back.",
    ),
    "worker": (
        ("the worker", "the GPU worker", "a worker"),
        "The worker pulls requests from the queue and runs the model in bursts. It takes tokens in and gives tokens out.",
    ),
    "broker": (
        ("the cache broker", "the broker", "the cache service"),
        "The cache broker keeps every prefix entry, lease, tenant and quota in Postgres. It is the only service that "
        "speaks SQL.",
    ),
    "burst": (
        ("a burst", "bursts", "one burst"),
        "A burst is a bounded run of draft and verify rounds between two scheduler decisions. Each burst sends one "
        "token frame.",
    ),
    "round": (
        ("a round", "rounds", "one round"),
        "A round drafts k tokens, verifies them in one forward pass, accepts m of them and commits m plus one.",
    ),
    "drafter": (
        ("a drafter", "drafters", "the drafter"),
        "A drafter proposes tokens for the trunk to verify. It can be the MTP head, a block drafter, an n-gram table or "
        "a replay.",
    ),
    "trunk": (
        ("the trunk", "the target model"),
        "The trunk is the target model. It decides every token; a drafter only guesses.",
    ),
    "mtp": (
        ("the MTP head", "MTP", "multi-token prediction"),
        "The MTP head is one small block that guesses the next tokens from the trunk's last hidden state. The trunk "
        "checks each guess.",
    ),
    "capture": (
        ("a boundary capture", "a capture", "captures"),
        "A boundary capture saves the states that going on would destroy, at a position on the 64-token grid. It "
        "becomes a prefix entry.",
    ),
    "entry": (
        ("a prefix entry", "prefix entries", "a cache entry"),
        "A prefix entry is a published capture. The next request with the same prefix restores it instead of computing "
        "it again.",
    ),
    "grid": (
        ("the grid", "the 64-token grid"),
        "The grid is every position that is a multiple of 64. Captures are only cut there.",
    ),
    "boundary": (("a boundary", "boundaries"), "A boundary is a grid position where a capture is taken."),
    "anchor": (
        ("the anchor", "an anchor"),
        "The anchor is the newest token that is not yet in the cache. It is column 0 of the next verify.",
    ),
    "chainkey": (
        ("a chain key", "chain keys"),
        "A chain key is a SHA-256 hash over the previous key and the next 64 token ids. It names a prefix.",
    ),
    "namespace": (
        ("a namespace", "namespaces"),
        "A namespace joins the model fingerprint, the adapter, the tenant and an optional salt. No lookup can cross it.",
    ),
    "fingerprint": (
        ("the model fingerprint", "a fingerprint"),
        "The model fingerprint is a digest of weights, config and numerics. Two workers with one fingerprint compute "
        "the same bits.",
    ),
    "tenant": (
        ("a tenant", "tenants"),
        "A tenant is a customer with its own keys, quotas and cache entries. Tenants never share a cache.",
    ),
    "quota": (
        ("a quota", "quotas", "the byte quota"),
        "A quota limits the bytes that a tenant may keep in the cache. The broker enforces it in one transaction.",
    ),
    "lease": (
        ("a lease", "leases"),
        "A lease protects a prefix entry while a worker restores it. A leased entry cannot be evicted.",
    ),
    "ledger": (
        ("the ledger", "ledger rows"),
        "The ledger records every reserve, settle, refund and evict. Its sum always equals the bytes held.",
    ),
    "journal": (
        ("the journal", "journals"),
        "The journal keeps every emitted token of a request on one subject. A new worker replays it after a crash.",
    ),
    "frame": (
        ("a frame", "token frames"),
        "A frame carries the tokens of one burst with their offset. Each frame is journalled and streamed.",
    ),
    "terminal": (
        ("a terminal frame", "the terminal frame"),
        "A terminal frame ends a request. It holds the finish reason and the usage.",
    ),
    "claim": (
        ("a claim", "claims"),
        "A claim is a started frame in the journal. The worker whose claim is last owns the request.",
    ),
    "trace": (
        ("a trace", "traces", "the trace"),
        "A trace follows one request from HTTP through the queue and the bursts to the SQL. Show it with burstline trace ID.",
    ),
    "nats": (
        ("NATS", "JetStream", "NATS JetStream"),
        "NATS JetStream is the durable queue between the gateway and the workers.",
    ),
    "postgres": (
        ("Postgres", "the database"),
        "Postgres holds tenants, keys, quotas, entries and the ledger. Only the cache broker talks to it.",
    ),
    "prime": (
        ("a prime", "priming"),
        "A prime is the prefill of a non-empty suffix into a session. It runs on the 64-token grid.",
    ),
    "demotion": (
        ("demotion", "a demotion"),
        "Demotion hands a session's sequence to plain batched decode. The tokens stay the same.",
    ),
    "session": (
        ("a session", "sessions"),
        "A session wraps one sequence and one drafter. It runs bursts until the answer ends.",
    ),
    "scheduler": (
        ("the scheduler",),
        "The scheduler decides which requests run next and returns a plan. It does nothing else.",
    ),
    "runner": (("the runner",), "The runner executes the scheduler's plan on the device."),
    "exact": (
        ("exactness", "the exact contract", "contract C1"),
        "Exact means that cache, drafter, batch and crash never change a token. The same request gives the same stream.",
    ),
    "speculation": (
        ("speculative decoding", "speculation"),
        "Speculative decoding lets a drafter guess tokens and the trunk verify them together. The text is the same, only faster.",
    ),
    "acceptance": (
        ("acceptance", "the acceptance rate"),
        "Acceptance is the share of drafted tokens that the trunk agrees with.",
    ),
    "tau": (
        ("tokens per verify", "tau"),
        "Tokens per verify is how many tokens one forward pass commits on average. Above 1.8 speculation pays.",
    ),
    "deltanet": (
        ("the gated delta net", "gated delta net layers"),
        "A gated delta net layer keeps a fixed-size state instead of a growing cache.",
    ),
    "hybrid": (
        ("a hybrid model", "hybrid models"),
        "A hybrid model mixes gated delta net layers with full attention, three to one here.",
    ),
    "slot": (
        ("a slot", "the slot pool"),
        "A slot is a fixed address that holds the recurrent states of one sequence.",
    ),
    "kvpage": (
        ("the KV cache", "KV blocks"),
        "Attention keys and values live in pages of 64 tokens with reference counts.",
    ),
    "replay": (
        ("replay", "a replay"),
        "Replay rebuilds a request from its journal: the prompt comes from the cache and the emitted tokens are verified as drafts.",
    ),
    "lane": (
        ("a lane", "lanes"),
        "A lane is one of 32 queue subjects for tenants. Lanes are pulled in turns, so tenants stay fair.",
    ),
    "salt": (
        ("a salt", "the cache salt"),
        "A salt narrows a namespace, so that two callers of one tenant do not share entries.",
    ),
    "adapter": (
        ("an adapter", "LoRA adapters"),
        "An adapter is a small weight change on top of the trunk. Its digest is part of the namespace.",
    ),
    "pocket": (
        ("the pocket model", "this model"),
        "The pocket model is a small hybrid model that ships with Burstline. It is for the demo and the tests.",
    ),
    "otlp": (
        ("OTLP", "trace export"),
        "Spans go out by OTLP when an endpoint is set. Otherwise they stay in a local store.",
    ),
    "idempotency": (
        ("an idempotency key", "idempotency keys"),
        "An idempotency key makes a repeated request return the first answer.",
    ),
    "drain": (
        ("a drain", "draining"),
        "On a drain a worker stops pulling and finishes its requests or hands them back.",
    ),
    "grammar": (
        ("a grammar mask", "grammar masks"),
        "A grammar mask forbids tokens that would break the asked format. The worker applies it row by row.",
    ),
}

WHAT: Final = (
    "What is {x}?",
    "What does {x} do?",
    "Explain {x}.",
    "Can you explain {x}?",
    "Tell me about {x}.",
    "What about {x}?",
    "How would you describe {x}?",
    "Describe {x} briefly.",
    "{x}: what is it?",
    "I don't know {x}. What is it?",
    "Define {x}.",
    "What do you know about {x}?",
    "Could you tell me what {x} is?",
    "What is meant by {x}?",
    "Give me a short description of {x}.",
    "Please explain {x} to me.",
    "In short, what is {x}?",
    "Help me understand {x}.",
    "What's {x}?",
    "what is {x}",
    "explain {x}",
    "Who or what is {x}?",
    "Why do we need {x}?",
    "What is the role of {x}?",
    "What is {x} for?",
    "Quick question: what is {x}?",
    "And what does {x} do?",
    "Say something about {x}.",
    "What does {x} mean?",
    "How does {x} work?",
    "I keep hearing about {x}; what is it?",
    "Tell me what {x} does.",
)
FOLLOW: Final = (
    "And {x}?", "What about {x}?", "And what is {x}?", "Now {x}.", "Next: {x}.", "Then what is {x}?", "OK, and {x}?",
    "Fine. And {x}?", "How about {x}?", "And then {x}?", "Thanks. And {x}?", "Also {x}?",
)  # fmt: skip

# question forms -> answer; longer answers and how-to questions
HOWTO: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (
        (
            "How do I run the demo?",
            "How can I start the demo?",
            "What command runs the demo?",
            "Show me how to run the demo.",
            "I want to see the demo. How?",
            "Which command starts the demo?",
        ),
        "Run make demo. It installs what it needs, starts the services and holds a three-turn chat.",
    ),
    (
        (
            "How do I run the tests?",
            "What runs the test suite?",
            "How can I test it?",
            "Which command runs all tests?",
            "How are the tests started?",
        ),
        "Run make test. It sets up everything and runs all tests.",
    ),
    (
        (
            "How do I keep it running?",
            "How do I start the whole stack?",
            "How can I leave the services up?",
            "Which command keeps the stack up?",
        ),
        "Run burstline up. It prints the URL and a key, and Ctrl-C drains it.",
    ),
    (
        (
            "How do I see a trace?",
            "How can I look at a trace?",
            "Show me how to view a trace.",
            "Where do I find the trace of a request?",
        ),
        "Run burstline trace with the trace id. It draws the spans as a waterfall.",
    ),
    (
        (
            "How do I check the ledger?",
            "How can I audit the cache?",
            "What does the audit check?",
            "How do I run an audit?",
        ),
        "Run burstline audit. It checks that the ledger, the entries and the bytes agree.",
    ),
    (
        (
            "How do I add a tenant?",
            "How can I create a tenant?",
            "What command adds a tenant?",
            "I need a new tenant. How?",
        ),
        "Run burstline tenant to add one, then burstline key to give it a key.",
    ),
    (
        (
            "How do I set a quota?",
            "How can I change a quota?",
            "What command sets a quota?",
            "Where are quotas set?",
        ),
        "Run burstline quota with the tenant and the number of bytes.",
    ),
    (
        (
            "How do I prove exactness?",
            "What does prove do?",
            "How is exactness checked?",
            "Which command proves the contract?",
        ),
        "Run burstline prove. It compares tokens and logprobs over cache, drafter, batch and crash.",
    ),
    (
        (
            "Which services are there?",
            "What services does Burstline have?",
            "Name the services.",
            "How many services are there?",
            "What are the parts of Burstline?",
            "Which parts does the system have?",
        ),
        "There are three services: the gateway, the GPU worker and the cache broker. NATS and Postgres stand between them.",
    ),
    (
        (
            "How does a request travel?",
            "Describe the way of a request.",
            "What happens to a request?",
            "List the steps of a request.",
            "How is a request processed, step by step?",
            "Walk me through a request.",
        ),
        "1. The gateway checks the key and renders the prompt.\n2. It looks up the longest cached prefix.\n3. It puts the "
        "request on the queue.\n4. A worker claims it and restores the prefix.\n5. The worker primes the rest and runs "
        "bursts.\n6. Each burst sends a frame.\n7. A terminal frame ends the request.",
    ),
    (
        (
            "Where are requests queued?",
            "Which queue is used?",
            "What is the queue made of?",
            "What carries the requests?",
        ),
        "Requests are queued on NATS JetStream.",
    ),
    (
        (
            "Where are quotas kept?",
            "Which database is used?",
            "Where does the broker store data?",
            "What stores the tenants?",
        ),
        "They are kept in Postgres, and only the cache broker talks to it.",
    ),
    (
        (
            "What happens when a worker dies?",
            "What if a worker crashes?",
            "Is a request lost when a worker is killed?",
            "How does it survive a crash?",
        ),
        "Another worker claims the request, reads the journal and goes on. No token is lost or sent twice.",
    ),
    (
        (
            "Why is the second turn faster?",
            "Why are later turns cheaper?",
            "How does the cache help a chat?",
            "Why is the next turn quick?",
        ),
        "The first turn published a capture of the shared prefix. The next turn restores it and primes only the rest.",
    ),
    (
        (
            "Can two tenants share a cache?",
            "Are tenants kept apart?",
            "Can another tenant read my cache?",
            "Is the cache shared?",
        ),
        "No. The tenant is part of the namespace, so a lookup never crosses tenants.",
    ),
    (
        (
            "What happens on a cache fault?",
            "What if a restore fails?",
            "What does a failed lookup cost?",
            "Is a cache error fatal?",
        ),
        "A cache fault is only a miss. The request takes the cold path and the fault is counted.",
    ),
    (
        (
            "How big is a KV block?",
            "How many tokens are in a block?",
            "What is the block size?",
            "How long is a page?",
        ),
        "A KV block holds 64 tokens.",
    ),
    (
        (
            "Which layers does this model have?",
            "What layers are in the pocket model?",
            "How many layers are there?",
            "What is the pocket model made of?",
        ),
        "It has four layers: three gated delta net layers and one gated attention layer.",
    ),
)
