#!/bin/sh
# Install the stages of a dataset, each when the stage before it is complete:
#   examples/deploy.sh [OPTION OF HELM UPGRADE...]
#
# The script passes a setting, such as --set tokenizer.name=..., to the stages whose charts have it, and refuses a setting
# that no stage's chart has. A file (-f) applies to all stages.
# A second run of the script does not change running or complete stages, and waits for them. It runs a stage again that
# failed or has other values. The script stops at the first stage that fails, prints the reason, and exits with 1.
#
#   STAGES     the stages in their order: download, extract, concatenate, preprocess (by default download and preprocess)
#   DATASET    a file of values/datasets, without its suffix; the releases are DATASET-STAGE (by default slimpajama)
#   VALUES     a directory with all.yaml and STAGE.yaml (by default examples/values)
#   NAMESPACE  the namespace (by default that of the kubeconfig)
set -eu
directory=$(cd "$(dirname "$0")" && pwd)
dataset=${DATASET:-slimpajama}
values=${VALUES:-$directory/values}
stages=${STAGES:-download preprocess}

# Print the settings of an option that the chart of any of these stages has: settings_of OPTION SETTINGS STAGE...
settings_of() (
  export OPTION="$1" SETTINGS="$2"
  shift 2
  for stage; do
    shift
    set -- "$@" "$directory/../charts/dataset-$stage/values.yaml"
  done
  awk -f "$directory/settings.awk" "$@"
)

# Install a stage with the options that apply to it: install STAGE [OPTION...]
install() {
  stage=$1 option=
  shift
  for argument; do # take each argument from the front of the list, and append those that apply
    shift
    case $option$argument in
      --set*=*)
        [ -n "$option" ] || { option=${argument%%=*} && argument=${argument#*=}; }
        kept=$(settings_of "$option" "$argument" "$stage")
        [ -z "$kept" ] || set -- "$@" "$option" "$kept"
        option=
        ;;
      --set*) option=$argument ;;
      *) set -- "$@" "$argument" ;;
    esac
  done
  helm ${NAMESPACE:+--namespace "$NAMESPACE"} upgrade --install "$dataset-$stage" "$directory/../charts/dataset-$stage" \
    -f "$directory/../values/datasets/$dataset.yaml" -f "$values/all.yaml" -f "$values/$stage.yaml" "$@" >/dev/null
}

option=
for argument; do
  case $option$argument in
    -n* | --namespace* | --kube*)
      echo "$argument applies only to helm, not to kubectl: set NAMESPACE, or KUBECONFIG and its context" >&2
      exit 2
      ;;
    --set*=*)
      [ -n "$option" ] || { option=${argument%%=*} && argument=${argument#*=}; }
      # shellcheck disable=SC2086 # a list of words
      if [ "$(settings_of "$option" "$argument" $stages)" != "$argument" ]; then
        echo "$option $argument: no stage of $stages has this setting; use a setting of charts/dataset-STAGE/README.md" >&2
        exit 2
      fi
      option=
      ;;
    --set*) option=$argument ;;
  esac
done

for stage in $stages; do
  install "$stage" "$@"
  "$directory/wait.sh" "$dataset-$stage"
done
