{{/*
Return how a training reads the rows. Input: the stage's dict, see tokenmill.stage. Output: text.
  {{ include "dataset-pack.next" (merge (dict "root" . "stage" "pack") (include "dataset-pack.command" . | fromJson)) }}
*/}}
{{- define "dataset-pack.next" -}}
{{- $paths := include "tokenmill.paths" . | fromYaml -}}
{{- $dataset := .root.Values.dataset -}}
{{- $shards := .root.Values.shards -}}
{{- $output := $paths.writes | default (printf "%s/packed" $paths.reads) -}}
{{- $validation := or (gt (int64 $shards.validation) 0) (not (empty ($dataset.blend).validation)) -}}
{{- $splits := or $validation (gt (int64 $shards.test) 0) (not (empty ($dataset.blend).test)) -}}
{{- if eq $shards.format "jsonl" -}}
The rows are JSON lines with input_ids, loss_mask and seq_start_id. Megatron-Bridge reads only --set shards.format=parquet.
{{- else -}}
Next, after completion: the training. {{ include "tokenmill.bridge" (dict "size" $dataset.packSize "output" $output "splits" $splits "validation" $validation) }}
{{- end }}
{{- end }}
