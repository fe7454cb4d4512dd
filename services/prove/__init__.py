"""`burstline prove`: one request has one token stream (C1), shown on the engine itself, without servers.

    axes      the table of what may vary; a new value is one entry        cover     which cells to run: a covering set, or all
    prompts   what is asked                                               models    what is asked of
    driver    plays the worker: submits, steps, answers captures          reference the stream of each request alone, cold and plain
    stage     runs cells, alone or in company                             compare   ids, log probabilities, endings, cache bytes
    plants    what the prefix cache holds before a cell                   ways      what happens to a cell while it runs
    scene     a cell about to run                                         script    the engine's fault hooks, told what to do
    report    table, evidence object                                      command   the command line

Knows the engine. Knows no queue, no gateway and no database.
"""
