"""Write tests/charts/kubernetes/: the schemas of what charts render, as the API server of KUBECONFIG has them.

    python tools/kubernetes_schemas.py

`make test` holds every render to them with kubeconform, without a network. They are cut down to the kinds below and
what these hold, without descriptions, and closed: an unknown field fails, as on a server that validates strictly.
The cluster must have the training operator and JobSet. A kind that a chart newly renders is added here.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "tests/charts/kubernetes"
DEFINITIONS = "_definitions.json"
GROUPS = {
    "api/v1": ("ConfigMap", "PersistentVolume", "PersistentVolumeClaim", "Pod", "Secret", "Service", "ServiceAccount"),
    "apis/apps/v1": ("Deployment",),
    "apis/batch/v1": ("Job",),
    "apis/networking.k8s.io/v1": ("NetworkPolicy",),
    "apis/policy/v1": ("PodDisruptionBudget",),
    "apis/storage.k8s.io/v1": ("StorageClass",),
    "apis/kubeflow.org/v1": ("PyTorchJob",),
    "apis/jobset.x-k8s.io/v1alpha2": ("JobSet",),
}
PROSE = ("description", "default", "example")


def server(path: str) -> Any:
    """Ask the API server."""
    done = subprocess.run(["kubectl", "get", "--raw", path], check=True, capture_output=True, text=True)  # noqa: S607
    return json.loads(done.stdout)


def closed(schema: Any) -> Any:
    """Return a schema without prose, whose objects take the properties that they name and no others."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        key: closed(value)
        for key, value in schema.items()
        # A property may be called like a keyword.
        if not key.startswith("x-kubernetes-") and (key not in PROSE or (isinstance(value, dict) and value))
    }
    if "$ref" in made:
        made["$ref"] = made["$ref"].replace("#/components/schemas/", "#/definitions/")
    if isinstance(made.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def referred(schema: Any) -> set[str]:
    """Return the definitions that a schema refers to."""
    if isinstance(schema, list):
        return {name for item in schema for name in referred(item)}
    if not isinstance(schema, dict):
        return set()
    own = {schema["$ref"].rpartition("/")[2]} if isinstance(schema.get("$ref"), str) else set()
    return own | {name for value in schema.values() for name in referred(value)}


def main() -> None:
    """Write a file for each kind, which refers to one with all definitions."""
    all_of_them: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    for path, wanted in GROUPS.items():
        found = server(f"/openapi/v3/{path}")["components"]["schemas"]
        all_of_them |= found
        for name, schema in found.items():
            for made in schema.get("x-kubernetes-group-version-kind", []):
                if made["kind"] in wanted:
                    kinds[made["kind"]] = name
    taken: dict[str, Any] = {}
    ahead = set(kinds.values())
    while ahead:
        taken |= {name: closed(all_of_them[name]) for name in ahead}
        ahead = referred([taken[name] for name in ahead]) - taken.keys()
    OUT.mkdir(exist_ok=True)
    for old in OUT.glob("*.json"):
        old.unlink()
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(taken[name], sort_keys=True)}" for name in sorted(taken))
    (OUT / DEFINITIONS).write_text(f'{{"definitions": {{\n{lines}\n}}}}\n')
    for kind, name in kinds.items():
        (OUT / f"{kind.lower()}.json").write_text(json.dumps({"$ref": f"{DEFINITIONS}#/definitions/{name}"}) + "\n")
    print(f"{len(kinds)} kinds of Kubernetes {server('/version')['gitVersion']}")


if __name__ == "__main__":
    main()
