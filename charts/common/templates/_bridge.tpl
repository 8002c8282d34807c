{{/*
Return how a recipe of Megatron-Bridge reads the rows of dataset-pack: the names are those of
megatron/bridge/data/builders/gpt_sft.py and data/packing/config.py. Input: dict "size" (tokens of a row), "output" (a
directory in the pods), "splits" (true if it has a directory for each split), "validation" (true if it has validation rows).
Output: text.
  {{ include "tokenmill.bridge" (dict "size" 4096 "output" "/data/x/packed" "splits" false "validation" false) }}
*/}}
{{- define "tokenmill.bridge" -}}
{{- $train := ternary (printf "%s/train" .output) .output .splits -}}
A recipe of Megatron-Bridge reads them with a micro-batch size of 1:
  dataset = GPTSFTDatasetConfig(seq_length={{ toJson .size }}, dataset_root={{ toJson .output }}, do_validation={{ ternary "True" "False" .validation }}, do_test=False,
    enable_offline_packing=True, offline_packing_specs=PackedSequenceSpecs(packed_sequence_size={{ toJson .size }},
      packed_train_data_path={{ toJson $train }},{{ if .validation }} packed_val_data_path={{ toJson (printf "%s/valid" .output) }},{{ end }}
      packed_metadata_path={{ toJson (printf "%s/metadata.json" .output) }}))
{{- end }}
