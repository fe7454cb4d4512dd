"""The worker: pulls requests from the queue and runs them on the engine. Tokens in, tokens out.

    app         one process            worker      deliveries, events, cancellations find their attempt
    pull        work by rank and room  attempt     one attempt of one request; claim, journal, item, lease are its parts
    host, api   the engine's thread    intake      what the engine tells of it; frames, outcome, convert are pure
    publish     captures to entries    evict       entries given back; book says what is held
    pulse       heartbeats, watchdog   spans, metrics   what is told of all that
"""
