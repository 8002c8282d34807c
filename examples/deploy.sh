#!/bin/sh
# Install the stages of a dataset, each when the one before it is complete:  examples/deploy.sh [OPTION OF HELM UPGRADE...]
#
# A setting that not every chart has, such as --set tokenizer.name=..., reaches the stages whose charts have it; one that no
# stage's chart has is refused. What is in a file (-f) is for all of them.
# Typed again it leaves alone what runs or is complete, goes on waiting for it, and runs again what had failed or has other
# values. It stops at the first stage that fails, says why, and exits with 1.
#
#   STAGES     in their order, of download, extract, concatenate and preprocess (the first and the last)
#   DATASET    a file of values/datasets, without its ending; the releases are DATASET-STAGE (slimpajama)
#   VALUES     a directory with all.yaml and STAGE.yaml (examples/values)
#   NAMESPACE  (that of the kubeconfig)
set -eu
here=$(cd "$(dirname "$0")" && pwd)
dataset=${DATASET:-slimpajama}
values=${VALUES:-$here/values}
stages=${STAGES:-download preprocess}

# The settings of an option that any of some stages' charts has: settings_of OPTION SETTINGS STAGE...
settings_of() (
  export OPTION="$1" SETTINGS="$2"
  shift 2
  for stage; do
    shift
    set -- "$@" "$here/../charts/dataset-$stage/values.yaml"
  done
  awk -f "$here/settings.awk" "$@"
)

# Install a stage with the options that concern it: install STAGE [OPTION...]
install() {
  stage=$1 option=
  shift
  for word; do # those from before; what is kept goes to the end of the list
    shift
    case $option$word in
      --set*=*)
        [ -n "$option" ] || { option=${word%%=*} && word=${word#*=}; }
        kept=$(settings_of "$option" "$word" "$stage")
        [ -z "$kept" ] || set -- "$@" "$option" "$kept"
        option=
        ;;
      --set*) option=$word ;;
      *) set -- "$@" "$word" ;;
    esac
  done
  helm ${NAMESPACE:+--namespace "$NAMESPACE"} upgrade --install "$dataset-$stage" "$here/../charts/dataset-$stage" \
    -f "$here/../values/datasets/$dataset.yaml" -f "$values/all.yaml" -f "$values/$stage.yaml" "$@" >/dev/null
}

option=
for word; do
  case $option$word in
    -n* | --namespace* | --kube*)
      echo "$word would reach helm alone, and not kubectl: set NAMESPACE, or KUBECONFIG and its context" >&2
      exit 2
      ;;
    --set*=*)
      [ -n "$option" ] || { option=${word%%=*} && word=${word#*=}; }
      # shellcheck disable=SC2086 # words of it
      if [ "$(settings_of "$option" "$word" $stages)" != "$word" ]; then
        echo "$option $word: no stage of $stages has this setting; charts/dataset-STAGE/README.md lists what they have" >&2
        exit 2
      fi
      option=
      ;;
    --set*) option=$word ;;
  esac
done

for stage in $stages; do
  install "$stage" "$@"
  "$here/wait.sh" "$dataset-$stage"
done
