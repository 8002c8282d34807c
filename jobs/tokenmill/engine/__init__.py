"""The code that plans, runs, resumes and records every data stage.

A stage turns input files into output files. `engine` splits this work into units and runs the units in any number of
workers. It stores all state in files on the shared storage: the state files of the stage. A killed worker therefore
loses only work on the units that it was running. This package contains no code for a single stage or file format.

State files, below the output directory of a stage:

    <output>/.tokenmill/<stage>/plan.json            the units, with their inputs and outputs
    <output>/.tokenmill/<stage>/planning.json        the lease of the worker that makes the plan
    <output>/.tokenmill/<stage>/replaced.json        the old plan, only while a new plan replaces it
    <output>/.tokenmill/<stage>/receipts/<unit>.json a finished unit: its files, their sizes and hashes, the plan id
    <output>/.tokenmill/<stage>/failures/<unit>.json the last error of a unit; deleted when the unit gets a receipt
    <output>/.tokenmill/<stage>/attempts/<unit>~<attempt>/  the unfinished files of one attempt
    <output>/.tokenmill/<stage>/runs/<run>           one file per run id; a run that replaces the plan closes all
                                                     other runs, which may not replace a plan any more
    <output>/.tokenmill/<stage>/manifest.json        all files of the stage; exists only when every unit is finished

The plan id is the hash of the plan. The run id is the same for all workers of one Job.

How a command runs a stage:

 1. The command line builds a Stage and calls `run.run_stage`. Every worker (process or pod) does this. The stage makes
    a request: its parameters and the state of its input. This state is the names, sizes and times of the user's own
    files, or the manifest hash of an earlier stage's output. For a remote source, the request has its address and the
    options that select files; the plan then has the listing.
 2. `planning` compares the request with `plan.json`. If there is no plan, the first worker acquires the lease
    `planning.json`, lists the inputs and writes `plan.json`. The other workers wait and read that file, so all workers
    have the same units.
 3. `partition` selects the units of this worker. The selection depends only on the plan, the index of the worker and
    the number of workers. So the units of two workers of one Job never overlap. A later Job may have another number of
    workers.
 4. `worker` reads the receipts of its units and runs the units that have no valid receipt. A receipt is valid if it has
    the id of this plan and if every file that it names has the recorded size.
 5. `workspace` makes one attempt at a unit. The attempt writes and hashes its files in its own directory below
    `attempts/`, then commits the unit: it renames the files to their final names and then writes the receipt. A file
    counts as output only if a receipt names it.
 6. The worker that finds a receipt for every unit writes `manifest.json`. The next stage reads that file. Two workers
    that do this at the same time write the same bytes.

To resume, run the same command again. This is what happens:

 1. If the request is unchanged, the workers use the existing plan.
 2. Units with a valid receipt are not run again. `--verify-hashes` also compares the hash of every file.
 3. Each other unit gets a new attempt. In download and preprocess (`Stage.resumable`), the new attempt takes over the
    files of the interrupted one: download appends to the file, if the source gives a hash, and preprocess continues
    after the input files that the journal lists. In other stages, the new attempt starts the unit from its beginning.
 4. A killed attempt may have renamed some files without writing a receipt. The next commit of the unit overwrites them.
 5. When all its units are done, a worker removes leftovers: the directories of attempts whose process is dead, and
    those of units that have a receipt. After SIGTERM or an error it removes none. Two attempts at one unit do no harm:
    both write the same bytes, and the attempt that finds a valid receipt at its commit stops without changing it.

If the request differs from the plan:

 - A new plan replaces the old one without `--replace` if all of this is true: only the state of the input differs; no
   planned file is missing; every finished unit is also in the new plan. The last condition is false if a finished unit
   contains a changed file, or if added files change the group of files of a finished unit. This rule lets the same
   command finish a stage after a user has corrected a damaged input file.
 - There is one other exception: a source has sent a wrong listing (`engine.run`).
 - In every other case, the command prints the difference and exits with code 2. With `--replace`, a new plan replaces
   the old one.

A replacement deletes the manifest. Units that are equal in both plans keep their files, and their receipts are written
again with the id of the new plan. The files of all other old units are removed. Pairs
that were adopted in place are never removed. Files that no plan of this stage names belong to the user: a plan that
would overwrite one is refused, and no file of the user is removed. A worker of a replaced plan finds another plan id
before it commits a unit, and exits with code 1. `runs/` prevents an old Job from putting its plan back.

The modules, lowest first: `contract` has the types of the state files and `record` reads and writes them. `attempt`
finds out which attempts are alive, `workspace` makes one attempt and commits it, `stage_input` selects the files that
a stage reads, and `lineage` traces each record to its source file. `runs` and `planning` agree on the plan.
`partition`, `executors` and `worker` run the units of a worker. `stage` declares what a stage must implement, and
`status` reports the progress from the state files alone.
"""
