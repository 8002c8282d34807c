"""Encoder processes: `pool` starts them, sends them text in shared memory, and replaces them when they crash or hang.

    planning process                                   encoder processes
    ----------------                                   -----------------
    EncoderProcesses(n)      -- start, endpoints ---->  first process: imports its modules, waits for a Task
      (makes the plan meanwhile)
    load_encoder(task, n)    -- Task, count --------->  first process: loads the encoder, then forks the other
                             <-- pid ----------------   processes, which share its tables; each sends its pid

    unit thread              slot: TEXT slab, IDS slab (anonymous shared memory; either side may grow a slab)
    -----------
    share().acquire()        a free slot of the least busy process
    blocks.fill(slot.text)   complete records, up to BLOCK bytes
    slot.submit(segments)    -- slab number, sizes, segments -->  parse, encode, write the ids into IDS
    slot.result()            <-- EncodedBlock: columns, counts, bad records, memory in use
    share().release(slot)

Failures, and how `pool` handles them:

    the process dies, or exceeds --encoder-patience    start another one; Hugging Face encodes the block
    the process grew by MAX_GROWTH                     end it between two blocks, and start another one
    MAX_FAILURES processes died or hung                Hugging Face encodes all remaining blocks
    the planning process dies                          the sockets close, and the encoder processes exit

`pool` runs in the planning process, `encoder_process` in the encoder processes; `slab` is the shared memory. The
messages are values of `encoder_process` (Task, Segment, Column, EncodedSegment, EncodedBlock). They travel over a
socket pair, with `multiprocessing.connection`.
"""
