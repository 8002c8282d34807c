"""Submission of a command to a cluster: `--on` runs the same command as jobs of Slurm or releases of Helm.

    profile     the profile that --on names, from tokenmill.toml
    call        a parsed command line, and the steps that it consists of
    slurm_job   the batch script of a step (pure)
    slurm       sbatch, and the states of submitted jobs
    values      the values of the charts for a command line (pure)
    kubernetes  helm, and the states of the objects of the charts

Slurm and Kubernetes schedule, restart and stop the jobs. This package composes what they receive, and reads their
states. The workers coordinate by the records of their output, so nothing of this package runs while they do.
"""
