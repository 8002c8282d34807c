#!/bin/sh
# Wait until the Job of a release has ended, and check its output:  examples/wait.sh RELEASE
#
# Exit codes: 0 if the Job is complete and `helm test` finds every file of its manifest; 1 with the reason if it failed.
# Other codes come from kubectl or helm, and the Job continues. NAMESPACE as in deploy.sh.
set -eu
release=$1

kubectl() { command kubectl ${NAMESPACE:+--namespace "$NAMESPACE"} "$@"; }
instance="app.kubernetes.io/instance=$release"
# An interrupted upgrade may leave an empty Job that is Complete. Only the Job of a stage has this annotation.
stage_job='{range .items[?(@.metadata.annotations.tokenmill/spec)]}'

# kubectl waits for one condition, but a Job can end with Complete or Failed: wait for Complete for 10 s, then check both.
while :; do
  state=$(kubectl get job -l "$instance" -o "jsonpath=$stage_job{.metadata.name} {.status.conditions[?(@.status==\"True\")].type}{end}")
  case $state in
    *Complete*) break ;;
    *Failed*)
      echo "$release has failed:" >&2
      kubectl logs -l "$instance,app.kubernetes.io/component!=verify" --tail=15 --prefix >&2
      exit 1
      ;;
    "")
      echo "$release has no Job; run: kubectl get jobs" >&2
      exit 1
      ;;
  esac
  kubectl wait "job/${state%% *}" --for=condition=Complete --timeout=10s >/dev/null 2>&1 || :
done

# A complete Job is not enough: the manifest and its files must be on the volume.
if ! output=$(helm ${NAMESPACE:+--namespace "$NAMESPACE"} test "$release" --logs --timeout 24h 2>&1); then
  echo "$release is complete, but its output differs from its manifest:" >&2
  echo "$output" >&2
  exit 1
fi
echo "$release is complete"
