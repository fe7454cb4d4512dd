"""Sessions: one sequence from its prompt to its end, a round at a time.

base         a session: plain decode                     mtp        SpecSession: a session with a drafter
dspark       DsparkSpecSession: with a block drafter     glm5       Glm5SpecSession: one live anchor, either drafter
block_context   what a session asks of a block drafter   auto    several drafters, the one that pays
prompt       its prompt side: prime, captures, checkpoint
completion   its completion side: history, journal, budget, ending
rounds       the one round loop over many sessions       handoff    demotion to plain decode
factory      which kind a request gets                   outcome    what a session hands to the engine
append       flush and append, under `reuse = "decode"`
graphs       the memo of a failed graph capture          telemetry  lifetime counters
"""
