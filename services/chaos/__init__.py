"""`burstline chaos`: the whole line under load while its parts are killed, stopped, cut off and filled up (C2, C3, C6).

    schedule.py   which fault comes when: a pure function of the seed
    inject.py     does a fault to a running stack, and undoes it
    front.py      a proxy before NATS, to cut and to slow connections
    cases.py      what is asked: a handful of requests whose streams are known from a quiet line
    asking.py     one caller's request over HTTP, with retries, reconnects and hanging up
    load.py       callers who go on asking
    journal.py    what the journal says of one request: one end, every token once, which worker came when
    baseline.py   what must be as it was at the end
    verdict.py    the whole run judged: streams, answers, takeovers
    promises.py   what is told of that: figures, bars
    scene.py      the stack of a run and what stands around it
    command.py    the command

A composition root: no service imports it.
"""
