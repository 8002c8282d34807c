# shellcheck shell=bash
# The beginning of a batch script whose profile has lines of setup, which follow. A line that fails ends the job.

end_after_failed_setup() {
  local code=$?
  [ "${#BASH_SOURCE[@]}" -le 2 ] || return 0 # a file that a line of setup sources may continue after a failure
  echo "tokenmill: a line of setup failed with exit code $code: $BASH_COMMAND" >&2
  exit "$code"
}

trap end_after_failed_setup ERR
