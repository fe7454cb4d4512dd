"""The worker: pulls requests from the queue and runs them on the engine. Tokens in, tokens out.

queue    pull, turns           work as there is room         depth     how much is there
         posts                 long polls that stand         neighbours   whose workers are gone
         setbacks              lanes that fail, at rest
         reception             deliveries become attempts    room      places, and seats for newcomers
         item                  one request's deliveries      claim     pure: what to do with a delivery; claimant makes it
request  attempt, ways_out     one attempt, start to end     journal   what is stored of it, and the fenced writer
         submit, relay         into the engine, and out      intake    what the engine tells of it
         grammars              what its tokens have to follow, compiled        meanwhile  work that fits into a wait
         frames, outcome       tokens to frames, the end     convert   our messages and the engine's requests
cache    publish               captures to entries           evict     entries given back
         book                  what is held                  debts     what the broker has still to be told
         lease                 the hit of one request        epochs    when the broker took this worker for dead
         broker                calls to the cache broker
engine   host, api             its thread, and its face as the worker sees it; the engine itself is the folder
whole    worker                events and cancellations find their attempt
         pulse                 heartbeats, watchdog          spans, metrics   what is told of all that
         app, core, config     the process
"""
