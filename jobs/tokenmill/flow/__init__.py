"""The engine that plans, runs, resumes and records every data stage.

A stage turns input files into output files. `flow` splits this work into units, runs the units in any number of
workers and records what is finished. All state is in files on a shared disk, so that a killed worker loses only the
units that it was running. This package contains no code of a particular stage and no file format.

Files on disk, below the output directory of a stage:

    <output>/.tokenmill/<stage>/plan.json            the units, their inputs and outputs; its hash is the plan id
    <output>/.tokenmill/<stage>/planning.json        the lease of the worker that makes the plan
    <output>/.tokenmill/<stage>/replaced.json        the old plan, only while a new plan replaces it
    <output>/.tokenmill/<stage>/receipts/<unit>.json a finished unit: its files, sizes and hashes
    <output>/.tokenmill/<stage>/failures/<unit>.json why a unit failed last; its receipt removes this file
    <output>/.tokenmill/<stage>/attempts/<unit>~<attempt>/  the unfinished files of one attempt; its commit removes them
    <output>/.tokenmill/<stage>/runs/<run>           a run that agreed on a plan, and whether it may still replace one
    <output>/.tokenmill/<stage>/manifest.json        all files of the stage; exists only when every unit is finished

A run of a stage:

 1. The command line builds a Stage and calls `run.run_stage`. Every worker (process or pod) does this.
 2. `planning` agrees on one plan. The first worker takes the lease `planning.json`, lists the inputs and publishes
    `plan.json`. The other workers wait and read that file, so that all of them have the same units.
 3. `partition` gives each worker its share of the units. The share depends only on the plan, the number of the worker
    and the number of workers, so the workers need no further communication.
 4. `worker` reads the receipts of its share and runs the units that have no valid receipt. A receipt is valid if it
    has the id of this plan and if every file that it names has the recorded size.
 5. `workspace` makes one attempt at a unit. The attempt writes and hashes its files in its own directory below
    `attempts/`, renames them to their final names, and writes the receipt last. The receipt is the commit: output files
    that no receipt names do not count.
 6. When every unit has a receipt, a worker combines the receipts into `manifest.json`. The next stage reads that file.

A resume is a second run of the same command. There is no other resume command:

 1. The request equals the request in `plan.json`, so the workers use the existing plan and make no new one.
 2. Units with a valid receipt are not run again. `--verify-hashes` also compares the hash of every file.
 3. A unit without a valid receipt is attempted again. If the stage can resume (`Stage.resumable`), the new attempt
    takes over the files of the killed attempt and continues from the journal that the stage keeps there. For other
    stages, the new attempt starts the unit from its beginning.
 4. Directories of killed attempts are removed. A killed attempt may also leave renamed files without a receipt: the
    next commit of the unit overwrites them.
 5. The directory of an attempt that may still be alive is never removed while its unit is unfinished. Two attempts at
    one unit do no harm: both write the same bytes, and the second one finds the receipt of the first and yields.
 6. If the input changed after the plan was made, a new plan replaces the old one, on three conditions: no other
    parameter changed, every planned file still exists, and the new plan keeps every finished unit. So after the user
    has corrected a damaged input file, the same command finishes the stage.

Any other difference between the request and the plan is an error. `--replace` accepts the difference: the new plan
replaces the old one, units that are equal in both plans keep their files and receipts, and the files of all other old
units are removed. A file that tokenmill did not make is never overwritten or removed. A run whose plan was replaced
stops: its workers find another plan id on disk before they commit, and `runs/` prevents them from replacing it back.

The modules, lowest first: `contract` has the types of the records and `record` reads and writes them. `attempt` finds
out which attempts are alive, `workspace` makes one attempt and commits it, `lineage` selects the files that a stage
reads and `provenance` tracks the source of each record. `runs` and `planning` agree on the plan, `partition`,
`executors` and `worker` run a share of its units, `stage` declares what a stage must implement, and `status` reports
the progress from the files alone.
"""
