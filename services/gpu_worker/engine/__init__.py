"""The engine: one thread that owns the device and turns requests into rows, and rows into tokens.

face     engine                 submit, step, cancel, publish, evict      cancels    what others want to be ended
         requests, events       what goes in, what comes out              stats      what can be said of it
         config, limits         sizes, policy                             intake     refuses what could not be served
         ground, memory         what it stands on, how a card's memory is divided
who      line, waiting          who waits, who goes in, who comes back    opening    a request becomes a stream
         scheduler              pure: admissions, shares, spec gate       gain, choice   what drafters are seen to bring
         trials                 launches timed at the start
         streams                one running request                       executor   carries a plan out
         onward                 whether the next burst may begin before this one is read
         preemption, aside      who gives way, and how                    wants      what should be free
         seats                  whose turn it is among several parties
         headroom               how many one launch may hold              accounts   totals, a picture
kept     affinity               finished sessions that wait for a turn    keeper     what decoding made
         sequence               rows, blocks and slot of one sequence
rows     runner, batch          what is launched, and of what             sampling   one row of logits, one token
         grammar                what a stream's grammar allows next
         placement              where a model lives, in which types       card_logits  rows that stay on the device
         rounds, whole, flights, device_rounds, device_drafts, inputs, graphs   decode launches that a graph replays
proof    fingerprint, probe     whose bits are the same                   faults, faulty   what may go wrong on purpose

Folders: sessions, drafters, models, layers, cache.
"""
