# shellcheck shell=bash
# The body of a batch script: it starts the command in a job step, and again after a failure. The table in slurm_job.py
# describes what it does after each exit code. slurm_job.py writes these variables before it:
: "${kind:?}"         # worker: a worker of a stage, or verify; training
: "${logs:?}"         # the directory of the logs
: "${max_failures:?}" # the number of failures after which a worker is not started again
: "${step[0]:?}"      # array: srun and its options
: "${command[0]:?}"   # array: the command of tokenmill

stopping='' interrupted='' failures=0 verdict=''

case $kind in
  worker)
    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    export TOKENMILL_RUN=slurm-$SLURM_ARRAY_JOB_ID
    ;;
  training)
    job=$SLURM_JOB_ID
    export TOKENMILL_RUN=slurm-$SLURM_JOB_ID TOKENMILL_NODES=$SLURM_NNODES
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    # The name of a cloud node may have no address.
    MASTER_ADDR=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    export MASTER_ADDR=${MASTER_ADDR:-$first} MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
    verdict=$logs/verdict-$SLURM_JOB_ID # the exit code of node 0, which decides for all nodes
    # shellcheck disable=SC2016 # the shell of each node expands the variables
    node='trap : USR1 TERM; "$@"; code=$?; [ "$SLURM_NODEID" != 0 ] || echo "$code" >"$0"; exit "$code"'
    step+=(bash -c "$node" "$verdict")
    ;;
esac

# Before the time limit: the command saves and ends.
trap 'stopping=1 interrupted=1; scancel --signal=USR1 "$job" 2>/dev/null' USR1
# scancel or a preemption: the command has received the signal too.
trap 'stopping=1 interrupted=1' TERM

# Queue this job again; $1 is the reason.
queue_again() {
  echo "tokenmill: $1: the job is queued again" >&2
  scontrol requeue "$job" && sleep 300
  exit 143
}

# Leave a job that Slurm ends, and queue one again whose time limit is near.
end_if_stopping() {
  local state
  state=$(squeue --noheader --jobs="$job" --format=%T) || state=RUNNING # the controller is away
  [ "$state" = RUNNING ] || exit 143
  [ -z "$stopping" ] || queue_again "stopped with exit code $code"
}

# Run a program and set `code` to its exit code. A trap interrupts `wait`, which then returns the code of the signal, so
# `wait` must be called again. After the end of the program, each `wait` returns its exit code. `kill -0 "$pid"` cannot
# show whether the program has ended: a later process may have the same pid.
run() {
  "$@" &
  local pid=$!
  while
    interrupted=''
    wait "$pid"
    code=$?
    [ -n "$interrupted" ]
  do :; done
}

while true; do
  case $kind in
    worker) export TOKENMILL_FAILURES=$failures TOKENMILL_MAX_FAILURES=$max_failures ;;
    training) rm -f "$verdict" ;;
  esac
  run "${step[@]}" "${command[@]}"
  [ ! -s "$verdict" ] || code=$(<"$verdict")
  case $code in 0 | 2) exit "$code" ;; esac

  end_if_stopping
  if sinfo --noheader --nodes="$SLURM_JOB_NODELIST" --format=%T | grep -q drain; then
    queue_again "a node is being drained"
  fi

  case $kind in
    worker)
      failures=$((failures + 1))
      if [ "$failures" -gt "$max_failures" ]; then
        echo "tokenmill: exit code $code, $failures times: see above, and submit the same command again" >&2
        exit "$code"
      fi
      echo "tokenmill: exit code $code: starting again, failure $failures of $max_failures" >&2
      pause=$((failures * 10))
      ;;
    training)
      echo "tokenmill: exit code $code: starting again" >&2
      pause=10
      ;;
  esac
  sleep "$pause" &
  wait
  [ -z "$stopping" ] || end_if_stopping # the signal came in the pause
done
