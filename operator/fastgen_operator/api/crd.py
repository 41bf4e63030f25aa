"""Generate the CustomResourceDefinition from the typed API.

Run `python -m fastgen_operator.api.crd [--write]`. `--write` writes `crds/` and the chart's copy in the current folder.
Otherwise the CRD is printed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel

from fastgen_operator.api import NAME_LIMIT, Spec
from fastgen_operator.api.status import Status
from fastgen_operator.kinds import FASTGEN, GROUP, VERSION

CRD_PATH: Final = Path("crds/fastgendeployments.yaml")
CHART_PATH: Final = Path("charts/fastgen/templates/crd.yaml")

# JSON Schema keywords that structural schemas allow; other keywords that pydantic generates are dropped.
_KEPT: Final = (
    *("type", "format", "description", "default", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength"),
    *("minItems", "maxItems", "minProperties", "maxProperties", "required", "anyOf"),
)


def custom_resource_definition() -> dict[str, Any]:
    """Return the CRD manifest."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{FASTGEN.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": FASTGEN.name,
                "listKind": f"{FASTGEN.name}List",
                "plural": FASTGEN.plural,
                "singular": FASTGEN.name.lower(),
                "shortNames": ["fgd"],
                "categories": ["all", "fastgen"],
            },
            "scope": "Namespaced",
            "versions": [_version()],
        },
    }


def _version() -> dict[str, Any]:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _root_schema()},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            _column("Model", "string", ".spec.model.source"),
            _column("Ready", "string", '.status.conditions[?(@.type=="Ready")].status'),
            _column("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason'),
            _column("Replicas", "integer", ".status.readyReplicas"),
            _column("Desired", "integer", ".status.desiredReplicas"),
            _column("Tokens/s", "integer", ".status.capacity.tokensPerSecond") | {"priority": 1},
            _column("Canary", "integer", ".status.canary.percent") | {"priority": 1},
            _column("URL", "string", ".status.url") | {"priority": 1},
            _column("Class", "string", ".spec.operatorClass") | {"priority": 1},
            _column("Age", "date", ".metadata.creationTimestamp"),
        ],
    }


def _column(name: str, kind: str, path: str) -> dict[str, Any]:
    return {"name": name, "type": kind, "jsonPath": path}


def _root_schema() -> dict[str, Any]:
    return {
        "type": "object",
        "description": "FastGenDeployment serves a language model with FastGen engines behind one OpenAI-compatible "
        "endpoint.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": {**structural(Spec), "description": "Desired state of the FastGenDeployment."},
            "status": {
                **structural(Status),
                "description": "Observed state of the FastGenDeployment.",
                # Before the operator's first status, Flux and others would take a resource without one for ready.
                "default": {"observedGeneration": 0},
            },
        },
        "x-kubernetes-validations": [
            {
                "rule": f"self.metadata.name.size() <= {NAME_LIMIT}",
                "message": f"metadata.name must be at most {NAME_LIMIT} characters: choose a shorter name",
            },
            {
                "rule": "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                "message": "metadata.name must start with a letter, end with a letter or digit, and contain only "
                "lower-case letters, digits and dashes, because the Service is named after it: choose another name",
            },
        ],
    }


def structural(model: type[BaseModel]) -> dict[str, Any]:
    """Return the structural schema of a model: references inlined, optional fields without null."""
    schema = model.model_json_schema(by_alias=True, mode="validation")
    return _convert(schema, schema.get("$defs", {}))


def _convert(node: dict[str, Any], definitions: dict[str, Any], *, in_list: bool = False) -> dict[str, Any]:
    if "$ref" in node:
        target = definitions[node["$ref"].rsplit("/", 1)[1]]
        node = {**target, **{word: value for word, value in node.items() if word != "$ref"}}
    options = [option for option in node.get("anyOf", ()) if option.get("type") != "null"]
    if len(options) == 1:
        # `X | None` is an optional field. Its null default is dropped: an unset field is absent from the resource.
        rest = {word: value for word, value in node.items() if word not in ("anyOf", "default")}
        node = {**_convert(options[0], definitions, in_list=in_list), **rest}
    schema: dict[str, Any] = {word: node[word] for word in _KEPT if word in node}
    if "description" in schema:
        schema["description"] = " ".join(schema["description"].split())
    schema |= {word: value for word, value in node.items() if word.startswith("x-kubernetes-")}
    if "const" in node:
        schema["enum"] = [node["const"]]
    if "properties" in node:
        schema["properties"] = {
            name: _convert(child, definitions, in_list=in_list) for name, child in node["properties"].items()
        }
    if "items" in node:
        schema["items"] = _convert(node["items"], definitions, in_list=True)
    if isinstance(node.get("additionalProperties"), dict):
        schema["additionalProperties"] = _convert(node["additionalProperties"], definitions)
    default = schema.get("default")
    if default is None or in_list:
        # kubectl apply and Argo CD compare lists as a whole: with defaults in their items, they would always see a
        # change. The operator has the same defaults.
        schema.pop("default", None)
        return schema
    if isinstance(default, (dict, list)):
        # An empty list or map equals an absent one. An object's default holds the defaults of its fields, because the
        # API server validates the default against the CEL rules as written.
        schema.pop("default")
        if "properties" in schema:
            fields = schema["properties"].items()
            schema["default"] = {name: child["default"] for name, child in fields if "default" in child}
    return schema


def crd_yaml() -> str:
    """Return the text of `crds/fastgendeployments.yaml`."""
    header = "# Generated from the operator's typed API by `python -m fastgen_operator.api.crd --write`.\n"
    return header + yaml.dump(custom_resource_definition(), sort_keys=False, width=110, Dumper=_Dumper)


def chart_yaml() -> str:
    """Return the text of the chart's template: the CRD, optional, and kept when the chart is uninstalled."""
    crd = custom_resource_definition()
    crd["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}
    body = yaml.dump(crd, sort_keys=False, width=110, Dumper=_Dumper)
    assert "{{" not in body, "the CRD contains a Helm template expression"
    header = "{{- /* Generated from the operator's typed API by `python -m fastgen_operator.api.crd --write`. */}}\n"
    return f"{header}{{{{- if .Values.crd.install }}}}\n{body}{{{{- end }}}}\n"


class _Dumper(yaml.SafeDumper):
    """Dumps equal objects in full instead of as YAML anchors."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def print_or_write(description: str, files: dict[Path, str]) -> None:
    """Run a generator's command line: print the text of the first file, or write all files with `--write`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--write", action="store_true", help=f"write {' and '.join(str(path) for path in files)}")
    if not parser.parse_args().write:
        print(next(iter(files.values())), end="")
        return
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def main() -> None:
    """Print the CRD, or write both files with `--write`."""
    print_or_write("Generate the FastGenDeployment CRD.", {CRD_PATH: crd_yaml(), CHART_PATH: chart_yaml()})


if __name__ == "__main__":
    main()
