# Print those settings of one option of helm, "a=1,b.c={2,3}", for which some charts have a default, in the same form:
#   OPTION=--set SETTINGS=a=1,b.c=2 awk -f settings.awk charts/dataset-download/values.yaml ...
# `dataset` has other keys in each chart. The chart's schema checks the keys of other sections.
/^[A-Za-z]/ { section = $1; sub(/:.*/, "", section); known[section] = 1 }
/^  [A-Za-z]/ { key = $1; sub(/:.*/, "", key); known[section "." key] = 1 }

function take(setting,    path, parts) {
  path = setting
  sub(/=.*/, "", path)
  sub(/\[.*/, "", path)
  split(path, parts, ".")
  if (parts[1] == "dataset" ? known[parts[1] "." parts[2]] : known[parts[1]]) kept = kept (kept == "" ? "" : ",") setting
}

END {
  text = ENVIRON["SETTINGS"]
  if (substr(text, 1, 1) == "{") { print text; exit }  # --set-json with a complete object
  single = ENVIRON["OPTION"] ~ /literal|file/
  json = ENVIRON["OPTION"] ~ /json/
  for (i = 1; i <= length(text); i++) {
    letter = substr(text, i, 1)
    if (letter == "\\") { setting = setting letter substr(text, ++i, 1); continue }
    if (json && letter == "\"") quoted = !quoted
    if (!quoted && letter ~ /[{[]/) depth++
    if (!quoted && letter ~ /[]}]/) depth--
    if (letter == "," && !quoted && !depth && !single) { take(setting); setting = ""; continue }
    setting = setting letter
  }
  take(setting)
  print kept
}
