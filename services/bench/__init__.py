"""`burstline bench`: speed, always against a baseline of the same run, with the spread of its repeats.

    load      what is asked, and one measured pass of an engine over it        spec     drafters against plain decode
    agents    traces of agents at work                                        cache    the prefix cache against others
    prefixes  what the prompts of a trace share                               replay   a trace against a cache alone
    drafters  what drafters bring on held-out text: held_out its prompts, alone answers them, counts adds verifies up
    history   drafters without a cache, block_reference the block drafter among them; rounds counts what they would bring
    tables    what is shown of these in the terminal
    decode    plain decode against the bare forward                           figures  medians and ratios
    stall     running streams beside a long prompt                            soak     faults at random, pools at their baseline
    queue     what gateway and queue add: queue_engine computes nothing, queue_worker runs it, queue_client asks; queue_floor,
              queue_direct and queue_peer compare, queue_way tells where the time went
    card      what those of a card begin with: card_decode, card_spec, card_engine, card_prefill, card_restore; card_peers compares;
              card_block draws a block drafter;
              card_record is the evidence of all of them, row by row
    command, card_command   the command lines

Drives engines by `prove`'s driver. Refuses to tell a ratio between streams that are not the same.
"""
