"""Why a run hangs: from the stacks and the flight-recorder dumps of its ranks to the rank that did not arrive.

`runtime.hang_record` writes these files next to the checkpoints when a run hangs. `tokenmill train diagnose` reads
them, and files of other programs. All of them are untrusted.

Modules, in the order of their imports:

    names           the names of a hang's directory and of its files
    flight_records  the operations that a rank recorded
    stacks          the stacks that a rank wrote
    evidence        all files of a directory, read into records
    operations      the operations that do not finish, and which ranks did not arrive
    report          the conclusion
    text            the report as text
"""
