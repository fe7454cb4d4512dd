"""`burstline prove`: one request has one token stream (C1), shown on the engine itself, without servers.

    axes      the table of what may vary; a new value is one entry        cover     which cells to run: a covering set, or all
    prompts   what is asked                                               models    what is asked of
    driver    plays the worker: submits, steps, answers captures          reference the stream of each request alone, cold and plain
    stage     runs cells, alone or in company                             compare   ids, log probabilities, endings, cache bytes
    plants    what the prefix cache holds before a cell                   ways      what happens to a cell while it runs
    scene     a cell about to run                                         script    the engine's fault hooks, told what to do
    families  claims that are no value of an axis, by their own trials    report    table, evidence object
    shards    the parts of a run, each in a process                       command   the command line
    turns     the family of `reuse = "decode"`                            trial     one trial of a family
    drafts    the family of drafters on families of models                rules     how tokens are picked
    public    the family of a public model that was added                 rows      the family of a model's rows in any company
    small     the engines of trials                               device    where a process computes
    grammars  the family of streams that follow a grammar

To add something to be shown:

    a model, plant, way, prompt, rule ...   one entry of its table (`MODELS`, `CACHES`, `WAYS` ...); what it cannot be
                                            combined with is one entry of `axes.NEEDS`. `--quick` covers each value with
                                            every value of the other axes on the tiny model, and each model with every
                                            value once; `--full` covers all pairs on every model
    bytes that only some models keep        `CacheBytes.parts`, filled by `WatchedEngine`, compared by their name
    a claim with another reference          a module of its own that makes `Trial`s, and one entry of `families.FAMILIES`:
                                            a stream is judged by `compare.judge(Exam(cell="what was tried", ...), ...)`

Knows the engine. Knows no queue, no gateway and no database.
"""
