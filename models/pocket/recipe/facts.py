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
    "What is {x} used for?",
    "Explain what {x} is.",
    "Explain what {x} does.",
    "How does {x} help?",
    "What is the point of {x}?",
    "Tell me more about {x}.",
    "What is {x} exactly?",
    "Describe what {x} does.",
)
FOLLOW: Final = (
    "And {x}?", "What about {x}?", "And what is {x}?", "Now {x}.", "Next: {x}.", "Then what is {x}?", "OK, and {x}?",
    "Now what is {x}?", "And {x} then?", "What of {x}?", "And what about {x}?", "Next, {x}.", "{x} too?", "And {x}, what is that?", "Good. Now {x}?",
    "Fine. And {x}?", "How about {x}?", "And then {x}?", "Thanks. And {x}?", "Also {x}?",
)  # fmt: skip

# (ways to name the action, answer): asked by wordings.HOW_FORMS
HOWTO: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (
        ("run the demo", "start the demo", "see the demo", "try the demo"),
        "Run make demo. It installs what it needs, starts the services and holds a three-turn chat.",
    ),
    (
        ("run the tests", "run the test suite", "test it", "start the tests"),
        "Run make test. It sets up everything and runs all tests.",
    ),
    (
        ("keep it running", "start the whole stack", "leave the services up", "start the server"),
        "Run burstline up. It prints the URL and a key, and Ctrl-C drains it.",
    ),
    (
        ("see a trace", "view a trace", "look at the trace of a request", "show a trace"),
        "Run burstline trace with the trace id. It draws the spans as a waterfall.",
    ),
    (
        ("check the ledger", "audit the cache", "run an audit", "audit the ledger"),
        "Run burstline audit. It checks that the ledger, the entries and the bytes agree.",
    ),
    (
        ("add a tenant", "create a tenant", "make a new tenant", "set up a tenant"),
        "Run burstline tenant to add one, then burstline key to give it a key.",
    ),
    (
        ("set a quota", "change a quota", "raise the quota of a tenant", "limit the bytes of a tenant"),
        "Run burstline quota with the tenant and the number of bytes.",
    ),
    (
        ("prove exactness", "check exactness", "prove the contract", "verify that streams are equal"),
        "Run burstline prove. It compares tokens and logprobs over cache, drafter, batch and crash.",
    ),
    (
        ("measure the speed", "run a benchmark", "benchmark it", "compare the speed"),
        "Run burstline bench. It prints ratios to the peer or to the floor of the same run.",
    ),
    (
        ("stop the stack", "shut it down", "stop the services", "end it cleanly"),
        "Press Ctrl-C. The stack drains and stops clean.",
    ),
)

# (indirect questions, answer): asked by wordings.CLAUSE_FORMS or as they stand
CLAUSES: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (
        (
            "which services there are",
            "what services Burstline has",
            "how many services there are",
            "what the parts of the system are",
            "which parts the system has",
        ),
        "There are three services: the gateway, the GPU worker and the cache broker. NATS and Postgres stand between them.",
    ),
    (
        (
            "how a request travels",
            "what happens to a request",
            "which steps a request takes",
            "how a request is processed",
            "what way a request goes",
        ),
        "1. The gateway checks the key and renders the prompt.\n2. It looks up the longest cached prefix.\n3. It puts the "
        "request on the queue.\n4. A worker claims it and restores the prefix.\n5. The worker primes the rest and runs "
        "bursts.\n6. Each burst sends a frame.\n7. A terminal frame ends the request.",
    ),
    (
        (
            "where requests are queued",
            "which queue is used",
            "what the queue is made of",
            "what carries the requests",
        ),
        "Requests are queued on NATS JetStream.",
    ),
    (
        (
            "where quotas are kept",
            "which database is used",
            "where the broker stores data",
            "what stores the tenants",
        ),
        "They are kept in Postgres, and only the cache broker talks to it.",
    ),
    (
        (
            "what happens when a worker dies",
            "what happens if a worker crashes",
            "whether a request is lost when a worker is killed",
            "how it survives a crash",
        ),
        "Another worker claims the request, reads the journal and goes on. No token is lost or sent twice.",
    ),
    (
        (
            "why the second turn is faster",
            "why later turns are cheaper",
            "how the cache helps a chat",
            "why the next turn is quick",
        ),
        "The first turn published a capture of the shared prefix. The next turn restores it and primes only the rest.",
    ),
    (
        (
            "whether two tenants share a cache",
            "whether tenants are kept apart",
            "if another tenant can read my cache",
            "whether the cache is shared",
        ),
        "No. The tenant is part of the namespace, so a lookup never crosses tenants.",
    ),
    (
        (
            "what happens on a cache fault",
            "what happens if a restore fails",
            "what a failed lookup costs",
            "whether a cache error is fatal",
        ),
        "A cache fault is only a miss. The request takes the cold path and the fault is counted.",
    ),
    (
        (
            "how big a KV block is",
            "how many tokens are in a block",
            "what the block size is",
            "how long a page is",
        ),
        "A KV block holds 64 tokens.",
    ),
    (
        (
            "which layers this model has",
            "what layers are in the pocket model",
            "how many layers there are",
            "what the pocket model is made of",
        ),
        "It has four layers: three gated delta net layers and one gated attention layer.",
    ),
)

# the same questions asked straight; index k of a row goes with row k of CLAUSES
STRAIGHT: Final[tuple[tuple[str, ...], ...]] = (
    ("Which services are there?", "What services does Burstline have?", "Name the services.", "How many services are there?",
     "What are the parts of Burstline?", "Which parts does the system have?", "List the services.", "What services run?"),
    ("How does a request travel?", "Describe the way of a request.", "What happens to a request?", "List the steps of a request.",
     "How is a request processed, step by step?", "Walk me through a request.", "What is the way of a request?", "Trace a request for me."),
    ("Where are requests queued?", "Which queue is used?", "What is the queue made of?", "What carries the requests?",
     "Which queue do you use?", "Where do requests wait?", "What is the queue?", "Where does a request wait?"),
    ("Where are quotas kept?", "Which database is used?", "Where does the broker store data?", "What stores the tenants?",
     "Where is the data?", "What database do you use?", "Where are tenants stored?", "Where do quotas live?"),
    ("What happens when a worker dies?", "What if a worker crashes?", "Is a request lost when a worker is killed?", "How does it survive a crash?",
     "What if a worker is killed?", "Does a crash lose tokens?", "A worker died. What now?", "What happens on a crash?"),
    ("Why is the second turn faster?", "Why are later turns cheaper?", "How does the cache help a chat?", "Why is the next turn quick?",
     "Why does the second answer come faster?", "What makes the next turn fast?", "How does the cache make turns faster?", "Why is turn two faster?"),
    ("Can two tenants share a cache?", "Are tenants kept apart?", "Can another tenant read my cache?", "Is the cache shared?",
     "Do tenants share a cache?", "Can tenants see each other?", "Is my cache private?", "Does another tenant see my entries?"),
    ("What happens on a cache fault?", "What if a restore fails?", "What does a failed lookup cost?", "Is a cache error fatal?",
     "What if the cache fails?", "What happens when the cache is broken?", "What if a lookup fails?", "Does a cache fault break a request?"),
    ("How big is a KV block?", "How many tokens are in a block?", "What is the block size?", "How long is a page?",
     "How large is a block?", "What is the size of a KV block?", "How many tokens does a block hold?", "Block size?"),
    ("Which layers does this model have?", "What layers are in the pocket model?", "How many layers are there?", "What is the pocket model made of?",
     "How many layers do you have?", "What layers do you have?", "Describe the layers of the model.", "Which layers are there?"),
)  # fmt: skip
