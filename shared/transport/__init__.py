"""The seam to the queue: one Protocol (`base`), NATS (`nats`, which alone imports
nats-py, with `nats_client` and `frames`) and memory (`memory`).

Both implementations pass the same suite, tests/contract.

    base     the contract            client    the transport over a wire     memory         the twin
    buffer   bounded subscriptions   jetstream calls, appends, reads         memory_stream  its streams
    service  the answering side      pull, take  durable pull consumers      wire, nats     the connection
    nats_client   nats-py as it is used here     frames, fields   what it reads, cut up     specs   streams and consumers made
    access   credentials, TLS        suitability   whether this server will do       bodies         claim checks
    asked    questions that wait for their answers
"""
