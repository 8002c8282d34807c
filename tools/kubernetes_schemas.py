"""Write tests/charts/kubernetes/: the schemas of the kinds of charts and examples, from the API server of KUBECONFIG.

    python tools/kubernetes_schemas.py

`make test` validates every render against them with kubeconform, without a network. They contain only the kinds below
and their definitions, without descriptions. They refuse unknown fields, as a server with strict validation does. The
cluster must have the training operator, JobSet, and the definitions of Flux's source-controller and helm-controller. If
a chart renders a new kind, add the kind to GROUPS.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parents[1] / "tests/charts/kubernetes"
DEFINITIONS_FILE = "_definitions.json"
GROUPS = {
    "api/v1": ("ConfigMap", "PersistentVolume", "PersistentVolumeClaim", "Pod", "Secret", "Service", "ServiceAccount"),
    "apis/apps/v1": ("Deployment",),
    "apis/batch/v1": ("Job",),
    "apis/networking.k8s.io/v1": ("NetworkPolicy",),
    "apis/policy/v1": ("PodDisruptionBudget",),
    "apis/storage.k8s.io/v1": ("StorageClass",),
    "apis/kubeflow.org/v1": ("PyTorchJob",),
    "apis/jobset.x-k8s.io/v1alpha2": ("JobSet",),
    # of examples/flux
    "apis/source.toolkit.fluxcd.io/v1": ("OCIRepository",),
    "apis/helm.toolkit.fluxcd.io/v2": ("HelmRelease",),
}
PROSE_KEYWORDS = ("description", "default", "example")


def fetch(path: str) -> Any:
    """Return the API server's response to a GET request."""
    process = subprocess.run(["kubectl", "get", "--raw", path], check=True, capture_output=True, text=True)  # noqa: S607
    return json.loads(process.stdout)


def strict_schema(schema: Any) -> Any:
    """Return a schema without prose, whose objects accept only the properties that they name."""
    if isinstance(schema, list):
        return [strict_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {
        key: strict_schema(value)
        for key, value in schema.items()
        # A property may have the name of a keyword.
        if not key.startswith("x-kubernetes-") and (key not in PROSE_KEYWORDS or (isinstance(value, dict) and value))
    }
    if "$ref" in strict:
        strict["$ref"] = strict["$ref"].replace("#/components/schemas/", "#/definitions/")
    if isinstance(strict.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    return strict


def referenced_names(schema: Any) -> set[str]:
    """Return the names of the definitions that a schema refers to."""
    if isinstance(schema, list):
        return {name for item in schema for name in referenced_names(item)}
    if not isinstance(schema, dict):
        return set()
    own = {schema["$ref"].rpartition("/")[2]} if isinstance(schema.get("$ref"), str) else set()
    return own | {name for value in schema.values() for name in referenced_names(value)}


def main() -> None:
    """Write one file per kind, which refers to the file with all definitions."""
    definitions: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    for path, names in GROUPS.items():
        schemas = fetch(f"/openapi/v3/{path}")["components"]["schemas"]
        definitions |= schemas
        for name, schema in schemas.items():
            for version_kind in schema.get("x-kubernetes-group-version-kind", []):
                if version_kind["kind"] in names:
                    kinds[version_kind["kind"]] = name
    used: dict[str, Any] = {}
    pending = set(kinds.values())
    while pending:
        used |= {name: strict_schema(definitions[name]) for name in pending}
        pending = referenced_names([used[name] for name in pending]) - used.keys()
    OUTPUT.mkdir(exist_ok=True)
    for old_file in OUTPUT.glob("*.json"):
        old_file.unlink()
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(used[name], sort_keys=True)}" for name in sorted(used))
    (OUTPUT / DEFINITIONS_FILE).write_text(f'{{"definitions": {{\n{lines}\n}}}}\n')
    for kind, name in kinds.items():
        (OUTPUT / f"{kind.lower()}.json").write_text(
            json.dumps({"$ref": f"{DEFINITIONS_FILE}#/definitions/{name}"}) + "\n"
        )
    print(f"{len(kinds)} kinds of Kubernetes {fetch('/version')['gitVersion']}")


if __name__ == "__main__":
    main()
