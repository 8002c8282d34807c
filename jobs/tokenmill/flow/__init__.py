"""The code that plans, runs, resumes and records every data stage.

A stage turns input files into output files. `flow` splits this work into units and runs the units in any number of
workers. It stores all state in files on the shared storage: the state files of the stage. A killed worker therefore
loses only work on the units that it was running. This package contains no code for a single stage or file format.

State files, below the output directory of a stage:

    <output>/.tokenmill/<stage>/plan.json            the units, with their inputs and outputs
    <output>/.tokenmill/<stage>/planning.json        the lease of the worker that makes the plan
    <output>/.tokenmill/<stage>/replaced.json        the old plan, only while a new plan replaces it
    <output>/.tokenmill/<stage>/receipts/<unit>.json a finished unit: its files, their sizes and hashes, the plan id
    <output>/.tokenmill/<stage>/failures/<unit>.json the last error of a unit; deleted when the unit gets a receipt
    <output>/.tokenmill/<stage>/attempts/<unit>~<attempt>/  the unfinished files of one attempt
    <output>/.tokenmill/<stage>/runs/<run>           one file per run id; it contains "closed" after another run has
                                                     replaced the plan of this run
    <output>/.tokenmill/<stage>/manifest.json        all files of the stage; exists only when every unit is finished

The plan id is the hash of the plan. The run id is the same for all workers of one Job.

How a command runs a stage:

 1. The command line builds a Stage and calls `run.run_stage`. Every worker (process or pod) does this. The stage makes
    a request: its parameters, and the names, sizes and times of its input files if the input is a directory.
 2. `planning` compares the request with `plan.json`. If there is no plan, the first worker acquires the lease
    `planning.json`, lists the inputs and writes `plan.json`. The other workers wait and read that file, so all workers
    have the same units.
 3. `partition` selects the units of this worker. The selection depends only on the plan, the index of the worker and
    the number of workers. The workers do not communicate, and no worker does the units of another one.
 4. `worker` reads the receipts of its units and runs the units that have no valid receipt. A receipt is valid if it
    has the id of this plan and if every file that it names has the recorded size.
 5. `workspace` makes one attempt at a unit. The attempt writes and hashes its files in its own directory below
    `attempts/`, renames them to their final names, and then writes the receipt. The receipt commits the unit: a file
    counts as output only if a receipt names it.
 6. The worker that finds a receipt for every unit writes `manifest.json`. The next stage reads that file. Two workers
    that do this at the same time write the same bytes.

To resume, run the same command again. This is what happens:

 1. If the request is unchanged, the workers use the existing plan.
 2. Units with a valid receipt are not run again. `--verify-hashes` also compares the hash of every file.
 3. Each other unit gets a new attempt. If the stage has resumable units (`Stage.resumable`), the new attempt takes over
    the directory of the killed attempt: download appends to the file in it, and preprocess reads the journal in it. In
    other stages, the new attempt starts the unit from its beginning.
 4. A killed attempt may have renamed some files without writing a receipt. The next commit of the unit overwrites them.
 5. At the end of its work, a worker removes the directories of killed attempts. It removes a directory only if the
    process of the attempt is dead, or if the unit has a receipt. Two attempts at one unit do no harm: both write the
    same bytes, and the attempt that finds a receipt at its commit stops without changing it.

If the request differs from the plan:

 - Only the input changed: files were added, or files changed that no finished unit contains. No planned file is
   missing. Then a new plan replaces the old one if it keeps every finished unit. So after a user has corrected a
   damaged input file, the same command finishes the stage.
 - Any other difference: the command prints it and exits with code 2. With `--replace`, a new plan replaces the old one.

A replacement deletes the manifest. Units that are equal in both plans keep their files, and their receipts are written
again with the id of the new plan. The files of all other old units are removed. Files that no plan of this stage names
belong to the user: a plan that would overwrite one is refused, and no file of the user is removed. A worker of a
replaced plan finds another plan id before it commits a unit, and stops. `runs/` prevents an old Job from putting its
plan back.

The modules, lowest first: `contract` has the types of the state files and `record` reads and writes them. `attempt`
finds out which attempts are alive, `workspace` makes one attempt and commits it, `stage_input` selects the files that
a stage reads, and `lineage` traces each record to its source file. `runs` and `planning` agree on the plan.
`partition`, `executors` and `worker` run the units of a worker. `stage` declares what a stage must implement, and
`status` reports the progress from the state files alone.
"""
