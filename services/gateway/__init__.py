"""The gateway: text in, text out.

OpenAI-style REST in front of the queue. It authenticates, validates, renders, tokenises, routes and enqueues, and turns
the journalled token stream back into text. Knows no device and no database: no torch, no SQL.

in      routes, schemas     the HTTP surface       body        JSON that nobody has to trust
        middleware          ids, root span, catch  connection  a caller who leaves
        auth, slots         who, and how many      limits, resolve  refused, or every parameter decided
text    vocabulary, model   a model folder         prompts     rendering and tokenising in threads
        rendering, header   the chat template      shield      callers' text is never a control token
        sandbox             where a template runs, and not for ever
        spelling            the bytes of a token, by the vocabulary's kind
        grammars            what an answer is asked to look like
queue   workers             who lives              routing     to whom
        dispatch            enqueue and cancel     generation, reader  one request, its news
        orphans             whose workers are gone  queues  how much there is, and when that is enough
        broker              calls to the cache broker   storing   a journal that takes nothing
again   keys                what a key stands for  lingering   callers who may come back
        sheet               how a request is told  resume      a reader of another call's request
out     answer, choice      tokens to events       detokenize, stops, parsers   their parts, pure
        echo                a prompt that is told  formats, chat_format, text_format   OpenAI's objects
        sse, faults         streams, errors        telling     to one reader, from where it is
        generate            all of it, in order    several     prompts of one call
whole   app, service        the process, its parts config, metrics
        openapi             /openapi.json
"""
