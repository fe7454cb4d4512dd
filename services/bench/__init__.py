"""`burstline bench`: speed, always against a baseline of the same run, with the spread of its repeats.

    load      what is asked, and one measured pass of an engine over it        spec     drafters against plain decode
    agents    traces of agents at work                                        cache    the prefix cache against others
    prefixes  what the prompts of a trace share                               replay   a trace against a cache alone
    decode    plain decode against the bare forward                           figures  medians and ratios
    stall     running streams beside a long prompt                            soak     faults at random, pools at their baseline
    command   the command line

Drives engines by `prove`'s driver. Refuses to tell a ratio between streams that are not the same.
"""
