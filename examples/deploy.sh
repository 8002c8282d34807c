#!/bin/sh
# Install the stages of a dataset, each when the one before it is complete:  examples/deploy.sh [OPTION OF HELM UPGRADE...]
#
# Typed again it leaves alone what runs or is complete, goes on waiting for it, and runs again what had failed or has other
# values. It stops at the first stage that fails, says why, and exits with 1.
#
#   STAGES     in their order, of download, extract, concatenate and preprocess (the first and the last)
#   DATASET    a file of values/datasets, without its ending; the releases are DATASET-STAGE (slimpajama)
#   VALUES     a directory with all.yaml and STAGE.yaml (examples/values)
#   NAMESPACE  (that of the kubeconfig)
set -eu
for option; do
  case $option in
    -n* | --namespace* | --kube*)
      echo "$option would reach helm alone, and not kubectl: set NAMESPACE, or KUBECONFIG and its context" >&2
      exit 2
      ;;
  esac
done
here=$(cd "$(dirname "$0")" && pwd)
dataset=${DATASET:-slimpajama}
values=${VALUES:-$here/values}

for stage in ${STAGES:-download preprocess}; do
  helm ${NAMESPACE:+--namespace "$NAMESPACE"} upgrade --install "$dataset-$stage" "$here/../charts/dataset-$stage" \
    -f "$here/../values/datasets/$dataset.yaml" -f "$values/all.yaml" -f "$values/$stage.yaml" "$@" >/dev/null
  "$here/wait.sh" "$dataset-$stage"
done
