#!/bin/sh
# Wait until a release's Job has ended, and look at what it made:  examples/wait.sh RELEASE
#
# Exit codes: 0 complete, and `helm test` finds every file that its manifest names; 1 failed, with the reason; another one
# is kubectl's or helm's own, and the Job goes on meanwhile. NAMESPACE as in deploy.sh.
set -eu
release=$1

kubectl() { command kubectl ${NAMESPACE:+--namespace "$NAMESPACE"} "$@"; }
instance="app.kubernetes.io/instance=$release"
# An upgrade that was interrupted may have left an empty Job behind, which is Complete: the real one has this annotation.
real='{range .items[?(@.metadata.annotations.tokenmill/spec)]}'

# kubectl waits for one condition and a Job has two ends: it waits for the good one, and looks for the bad one in between.
while :; do
  state=$(kubectl get job -l "$instance" -o "jsonpath=$real{.metadata.name} {.status.conditions[?(@.status==\"True\")].type}{end}")
  case $state in
    *Complete*) break ;;
    *Failed*)
      echo "$release has failed:" >&2
      kubectl logs -l "$instance,app.kubernetes.io/component!=verify" --tail=15 --prefix >&2
      exit 1
      ;;
    "")
      echo "$release has no Job; see: kubectl get jobs" >&2
      exit 1
      ;;
  esac
  kubectl wait "job/${state%% *}" --for=condition=Complete --timeout=10s >/dev/null 2>&1 || :
done

# What lies on the volume is the truth: the manifest, and the files that it names.
if ! said=$(helm ${NAMESPACE:+--namespace "$NAMESPACE"} test "$release" --logs --timeout 24h 2>&1); then
  echo "$release is complete and its output is not as its manifest says:" >&2
  echo "$said" >&2
  exit 1
fi
echo "$release is complete"
