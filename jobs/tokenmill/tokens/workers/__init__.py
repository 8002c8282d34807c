"""Encoder processes: started, fed with text through shared memory, replaced when they crash or hang.

    planning process                                   encoder processes
    ----------------                                   -----------------
    EncoderProcesses(n)      -- start, fds of ends -->  first process: imports, waits for a task
      (the plan is made meanwhile)
    begin(task, wanted)      -- Task, wanted -------->  first: loads the encoder, forks the others, who share its tables
                             <-- pid ----------------   each other one

    unit thread              slot: TEXT slab, IDS slab (shared memory without a name; either side may grow them)
    -----------
    share().acquire()        a free slot of the least busy process
    blocks.fill(slot.text)   whole records, up to BLOCK bytes
    slot.submit(segments)    -- slab number, sizes, segments -->  parse, encode, ids into IDS
    slot.result()            <-- Answer: columns, counts, bad records, memory held
    share().release(slot)

What may go wrong, and what `pool` does about it:

    the process dies, or is silent for longer than --encoder-patience     another starts; Hugging Face encodes the block
    the process grew by MAX_GROWTH                                        it is ended between two blocks, another starts
    more than MAX_FAILURES of these                                       Hugging Face encodes everything from there on
    the planning process dies                                             the sockets close, and the processes end

`pool` is the planning process's side, `serve` that of the encoder processes, `slab` the shared memory. The messages are
values of `serve` (Task, Segment, Column, Found, Answer) on a socket pair, by `multiprocessing.connection`.
"""
