"""The engine: one thread that owns the device and turns requests into rows, and rows into tokens.

engine       the face: submit, step, cancel, publish, evict
line         who waits, who goes in, who comes back      streams    one running request: what was delivered, what is told
scheduler    pure: admissions, prefill shares, spec gate executor   carries a plan out; puts right what did not fit
accounts     totals, and a picture between two steps     headroom   how many sequences one launch may hold
affinity     finished sessions that wait for a next turn intake     refuses what could not be served
requests     what goes in and what comes out             config     dimensions and pool sizes
runner       rows through the model                      batch      what the runner is asked for
sampling     one row of logits, one token                sequence   rows, blocks and slot of one sequence
faults       what may go wrong on purpose                faulty     the runner that does it
preemption   pure: who gives its blocks to an older one
"""
